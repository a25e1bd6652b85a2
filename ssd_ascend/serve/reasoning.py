"""Splits `<think> ... </think>` off the front of an answer: `reasoning_content` of the chat endpoint.

An answer that is constrained is so behind its thoughts: `after_thoughts` says that in the grammar.
"""

from __future__ import annotations

import enum
import json

from ssd_ascend.core.grammar import Grammar, GrammarKind
from ssd_ascend.serve.parts import Part, Reasoning, Text, held_back
from ssd_ascend.structured.compiler import with_options
from ssd_ascend.structured.reasons import NAMES, part

OPEN, CLOSE = "<think>", "</think>"


class Thinking(enum.Enum):
    """Whether the answer to a prompt may begin with thoughts."""

    NO = "no"
    MAY = "may"
    IS_OPEN = "is open"
    """The prompt itself ends with the opening mark."""


def thinking_after(prompt_end: str, *, model_thinks: bool) -> Thinking:
    """What the end of a prompt says about the answer. A template that forbids thoughts closes them itself."""
    end = prompt_end.rstrip()
    if not model_thinks or end.endswith(CLOSE):
        return Thinking.NO
    return Thinking.IS_OPEN if end.endswith(OPEN) else Thinking.MAY


def after_thoughts(grammar: Grammar, thinking: Thinking) -> Grammar:
    """`grammar`, with room for thoughts before it. A grammar that the client wrote holds for the whole answer."""
    match grammar.kind:
        case _ if thinking is Thinking.NO:
            return grammar
        case GrammarKind.JSON_SCHEMA:
            schema = with_options(json.loads(grammar.source), strict=grammar.strict)
            body = f"{part(NAMES[grammar.kind])}answer: %json {json.dumps(schema, ensure_ascii=False)}"
        case GrammarKind.REGEX:
            escaped = grammar.source.replace("\\/", "/").replace("/", "\\/")
            body = f"answer: ANSWER\n{part(NAMES[grammar.kind])}ANSWER: /{escaped}/"
        case _:
            return grammar
    opened = "closing GAP" if thinking is Thinking.IS_OPEN else f'("{OPEN}" closing GAP)?'
    rules = f'closing[lazy]: PROSE "{CLOSE}"\nPROSE: /(.|\\n)*/\nGAP: /[ \\n]{{0,4}}/'
    return Grammar(GrammarKind.LARK, f"start: {opened} answer\n{rules}\n{body}", grammar.strict)


class ReasoningStage:
    """Thoughts stand at the beginning of an answer or nowhere. `is_open`: the prompt has opened them already."""

    def __init__(self, *, is_open: bool) -> None:
        self._state = "thinking" if is_open else "before"
        self._held = ""
        self._thought_anything = False

    def feed(self, text: str) -> list[Part]:
        """See `Stage`."""
        if self._state == "after":
            return [Text(text)]
        self._held += text
        parts: list[Part] = []
        if self._state == "before":
            parts += self._before()
        if self._state == "thinking":
            parts += self._thinking()
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                parts.append(Text(self._held))
                self._state, self._held = "after", ""
        return parts

    def _before(self) -> list[Part]:
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._state, self._held = "thinking", start.removeprefix(OPEN)
        elif not OPEN.startswith(start):
            shown, self._held, self._state = self._held, "", "after"
            return [Text(shown)]
        return []

    def _thinking(self) -> list[Part]:
        if not self._thought_anything:
            self._held = self._held.lstrip()
        thought, mark, rest = self._held.partition(CLOSE)
        if mark:
            self._state, self._held = "gap", rest
            thought = thought.rstrip()
        else:
            # white space before the closing mark is not a thought, and may be just that
            keep = held_back(thought, CLOSE)
            safe = thought[: len(thought) - keep].rstrip()
            self._held = thought[len(safe) :]
            thought = safe
        self._thought_anything = self._thought_anything or bool(thought)
        return [Reasoning(thought)] if thought else []

    def finish(self, *, is_cut: bool) -> list[Part]:
        """See `Stage`."""
        rest, self._held = self._held, ""
        if self._state == "thinking":
            return [Reasoning(rest)] if rest.strip() else []
        return [Text(rest)] if rest and self._state == "before" else []
