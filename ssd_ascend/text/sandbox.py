"""The Jinja environment chat templates run in; imported by `chat_template` when a template is compiled.

A template comes with a model, from strangers: it sees data only, changes nothing, and touching an unsafe attribute is
an error at once (Jinja's own sandbox lets such an attribute print as nothing). The extras are those of transformers.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Environment(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is unsafe")


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant said, for training; in serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  the name and kind are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def template_environment() -> ImmutableSandboxedEnvironment:
    """The shared environment; it is never changed after it is built."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  templates pass these as they would to json.dumps
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Plain JSON; Jinja's own filter would escape < > & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
