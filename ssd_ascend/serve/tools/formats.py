"""How families of models write tool calls: the grammar that forces one, and the parser that reads it back.

`hermes` (Qwen2.5, Qwen3, Hermes) is also what models are told to write whose template knows no tools. `llama3` is
Llama 3.1 and later. `for_template` recognises the family by the model's own chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.serve.parts import Stage
from ssd_ascend.serve.tools.offer import Function, ToolOffer
from ssd_ascend.serve.tools.parsers import HERMES_CLOSE, HERMES_OPEN, HermesParser, Llama3Parser
from ssd_ascend.structured.compiler import with_options
from ssd_ascend.structured.reasons import part

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family. `before`, `between` and `after` stand around calls, `arguments` is what their key is called."""

    name: str
    before: str
    between: str
    after: str
    arguments: str
    make_parser: Callable[[ToolOffer], Stage]
    mark: str
    """What tells calls from prose where both may stand; empty where an answer is one or the other."""

    def parser(self, offer: ToolOffer) -> Stage:
        """Reads the calls of one answer."""
        return self.make_parser(offer)

    def _rules(self, offer: ToolOffer, *, opened: str = "") -> str:
        """Lark rules: `calls` is one call or several, `call` one, of which `opened` stands there already."""
        more = f"({_text(self.between)} call)*" if offer.parallel else ""
        names = [f"call_{number}" for number in range(len(offer.functions))]
        lines = [f"calls: call {more}", f"call: {' | '.join(names)}"]
        for name, function in zip(names, offer.functions, strict=True):
            head = f'{self.before}{{"name": {json.dumps(function.name)}, "{self.arguments}": '.removeprefix(opened)
            lines.append(f"{name}: {_text(head)} {name}_arguments {_text('}' + self.after)}")
            whose = part(f"the schema of the parameters of the tool {function.name!r}")
            lines.append(f"{whose}{name}_arguments: %json {json.dumps(_schema(function), ensure_ascii=False)}")
        return "\n".join(lines)

    def grammar(self, offer: ToolOffer) -> Grammar | None:
        """What constrains the answer: calls only where one must be made, calls among prose where arguments must be
        strict; None where the model is free."""
        if offer.must_call:
            return Grammar.lark(f"start: calls\n{self._rules(offer)}")
        if offer.is_strict and self.mark:
            rules = self._rules(replace(offer, parallel=False), opened=self.mark)
            marked = f"marked[lazy]: PROSE {_text(self.mark)}\nPROSE: /(.|\\n)*/"
            return Grammar.lark(f"start: (marked calls)* PROSE\n{marked}\n{rules}")
        return None


def _schema(function: Function) -> dict[str, Any]:
    """The schema of the arguments, with what cannot be enforced left out unless the function is strict."""
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    return with_options(schema, strict=bool(function.strict))


def _text(literal: str) -> str:
    """A string as Lark writes it."""
    return json.dumps(literal, ensure_ascii=False)


HERMES = ToolFormat(
    name="hermes",
    before=f"{HERMES_OPEN}\n",
    between="\n",
    after=f"\n{HERMES_CLOSE}",
    arguments="arguments",
    make_parser=lambda offer: HermesParser(most=None if offer.parallel else 1),
    mark=HERMES_OPEN,
)
LLAMA3 = ToolFormat(
    name="llama3",
    before="",
    between="; ",
    after="",
    arguments="parameters",
    make_parser=lambda offer: Llama3Parser(
        {function.name for function in offer.functions}, most=None if offer.parallel else 1
    ),
    mark="",
)
FORMATS = {format_.name: format_ for format_ in (HERMES, LLAMA3)}


def for_template(mentions: Callable[[str], bool]) -> ToolFormat:
    """The format of a model; `mentions` says whether its chat template has a text in it."""
    return LLAMA3 if mentions("parameters") and not mentions(HERMES_OPEN) else HERMES
