"""Why a grammar is refused, in a sentence for whoever wrote it. `compiler.py` asks.

llguidance says it in its own words, some of which mean nothing outside of it, and shows the source around the place.
Where we wrap a client's part in a grammar of ours, that source is ours: `part` marks it, and the part is named instead.
"""

from __future__ import annotations

import re

from ssd_ascend.core.grammar import Grammar, GrammarKind
from ssd_ascend.errors import RequestError

NAMES = {
    GrammarKind.JSON_SCHEMA: "the JSON schema",
    GrammarKind.REGEX: "the regular expression",
    GrammarKind.LARK: "the grammar",
}
SIMPLIFY = "make it smaller: fewer alternatives and links, shorter repeats"

_PART = "// part: "
_PLACE = re.compile(r"at (\d+)\(\d+\): (.*)", re.DOTALL)
_SOURCE = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
"""The lines of the grammar that a message ends with."""
_WRAPPING = re.compile(r"^failed to compile JSON schema: |^invalid regex .*?\(in regex\): ", re.DOTALL)
_PICTURE = re.compile(r"regex parse error:\n.*\nerror: ", re.DOTALL)
"""A regular expression with marks below it, of which one line makes no picture."""
_NOTHING = "NoExtensionBias"
_LIMITS = re.compile(
    r"too many (expressions|items)|too big \(limit|\(limit \d|limit exceeded at|; max is \d", re.IGNORECASE
)
_PANIC = re.compile(r"^panic: |panicked at |stack backtrace:", re.MULTILINE)
_SHOWN = 300


def part(name: str) -> str:
    """A line of Lark that says whose the next line is."""
    return f"{_PART}{name}\n"


def refusal(grammar: Grammar, message: str) -> RequestError:
    """What is wrong with `grammar`, by what llguidance says of it."""
    who, reason = _whose(grammar, message)
    if _PANIC.search(message):
        return too_much(who)
    if _NOTHING in message:
        return RequestError(
            f"{who} cannot be enforced: no text at all matches it",
            param="grammar",
            remedy="look for a rule or reference that only leads back to itself, or for a class without characters",
        )
    plain = _PICTURE.sub("regex parse error: ", reason.replace("<non-verbose/>", ""))
    shown = " ".join(plain.split())[:_SHOWN] or "unknown reason"
    if _LIMITS.search(shown):
        return too_much(who, shown)
    return RequestError(f"{who} cannot be enforced: {shown}", param="grammar")


def too_much(who: str, why: str = "") -> RequestError:
    """The refusal of a grammar that would take more time or memory than one may."""
    return RequestError(f"{who} is too much work{': ' if why else ''}{why}", param="grammar", remedy=SIMPLIFY)


def _whose(grammar: Grammar, message: str) -> tuple[str, str]:
    """Whose fault it is, and the message without what is not the client's."""
    name = NAMES[grammar.kind]
    place = _PLACE.fullmatch(message.strip())
    if place is None:
        return name, message
    detail = _WRAPPING.sub("", _SOURCE.sub("", place[2]))
    if grammar.kind is not GrammarKind.LARK:  # the place is one in what llguidance made of it
        return name, detail
    lines, number = grammar.source.split("\n"), int(place[1])
    before = lines[number - 2] if 2 <= number <= len(lines) else ""
    if not before.startswith(_PART):
        return name, message
    return before.removeprefix(_PART), detail
