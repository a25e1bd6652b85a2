"""What synthetic conversations begin with: openings of user turns, and the marks of the model's chat template.

A line of the openings file is a whole user turn, or, with "..." at its end, the beginning of one that the target goes
on writing. `{name}` stands for one item of the list that a line `@name: item | item | ...` gives.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.text import Tokenizer

_SLOT = re.compile(r"\{(\w+)\}")
_PROBES = ("⁂first⁂", "⁂second⁂", "⁂third⁂")


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """Token ids around turns. `before`: up to the first user turn. `after_user`: from its end to the answer's begin.
    `after_answer`: what follows the answer's own end token, up to the next user turn, None where the template rewrites
    history. `ends`: tokens that end an answer."""

    before: list[int]
    after_user: list[int]
    after_answer: list[int] | None
    ends: frozenset[int]


def turn_marks(tokenizer: Tokenizer) -> TurnMarks:
    """Read the marks off the chat template; ConfigError when there is none, or none that can be read."""
    if not tokenizer.chat.available:
        raise ConfigError(
            "the target has no chat template, so it cannot write conversations", remedy="give --data FILE"
        )
    first, second, third = _PROBES
    user, answer, again = (
        {"role": role, "content": content}
        for role, content in (("user", first), ("assistant", second), ("user", third))
    )
    try:
        one = tokenizer.chat.render_text([user], add_generation_prompt=True)
        two = tokenizer.chat.render_text([user, answer, again], add_generation_prompt=True)
    except RequestError as error:
        raise ConfigError(f"the target's chat template cannot be read: {error}", remedy="give --data FILE") from error
    before, found, after_user = one.partition(first)
    if not found or not tokenizer.eos_ids:
        raise ConfigError("the target's chat template does not print a user's words", remedy="give --data FILE")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    middle = (
        two.partition(second)[2].partition(third)[0] if two.startswith(before + first + after_user + second) else ""
    )
    after = encode(middle)
    whole = bool(after) and after[0] in tokenizer.eos_ids
    return TurnMarks(encode(before), encode(after_user), after[1:] if whole else None, tokenizer.eos_ids)


@dataclass(frozen=True, slots=True)
class Opening:
    """Tokens of a user turn; whether the target is to go on writing it."""

    tokens: list[int]
    is_open: bool


class Openings:
    """An endless, seeded supply of user turns."""

    def __init__(self, text: str, tokenizer: Tokenizer, *, where: str) -> None:
        """ConfigError names the line that cannot be understood."""
        self._tokenizer = tokenizer
        self._lists: dict[str, list[str]] = {}
        self._lines: list[str] = []
        slots: list[tuple[str, int]] = []
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if line.startswith("@"):
                name, colon, items = line[1:].partition(":")
                self._lists[name.strip()] = [item.strip() for item in items.split("|") if item.strip()]
                if not colon or not self._lists[name.strip()]:
                    raise ConfigError(f"{where}, line {number}: {line!r} is no list", remedy="write @name: item | item")
                continue
            slots += [(name, number) for name in _SLOT.findall(line)]
            self._lines.append(line)
        for name, number in slots:
            if name not in self._lists:
                raise ConfigError(
                    f"{where}, line {number}: there is no list {name!r}", remedy=f"add a line @{name}: item | item"
                )
        if not self._lines:
            raise ConfigError(f"{where} holds no openings")

    @classmethod
    def load(cls, file: Path | None, tokenizer: Tokenizer) -> Openings:
        """From a file, or our own."""
        if file is None:
            own = resources.files("ssd_ascend.training").joinpath("openings.txt")
            return cls(own.read_text(encoding="utf-8"), tokenizer, where="openings.txt")
        try:
            return cls(file.read_text(encoding="utf-8"), tokenizer, where=str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error

    def draw(self, rng: random.Random) -> Opening:
        """One user turn."""
        text = self.fill(rng)
        is_open = text.endswith("...")
        text = text.removesuffix("...").rstrip() if is_open else text
        return Opening(self._tokenizer.encode(text, add_special_tokens=False), is_open)

    def fill(self, rng: random.Random) -> str:
        """A random line, its slots filled at random."""
        line = rng.choice(self._lines)
        while _SLOT.search(line):  # an item may hold slots itself
            line = _SLOT.sub(lambda match: rng.choice(self._lists[match[1]]), line)
        return (line[:1].upper() + line[1:]).replace("\\n", "\n")
