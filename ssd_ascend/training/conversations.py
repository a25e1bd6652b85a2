"""Training text: token ids of whole conversations, and which of them the target wrote as answers.

Read from JSONL or written by the target (`synthesis.py`); kept in one file, so that a run can go on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Conversations:
    """Packed: tokens int32 [T]; answer bool [T], tokens of answers; forked bool [T], tokens put in another's place.

    starts int64 [n + 1]: conversation i is [starts[i], starts[i + 1]). greedy bool [n]: answered at temperature 0.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    forked: torch.Tensor
    starts: torch.Tensor
    greedy: torch.Tensor

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each."""
        return np.diff(self.starts.numpy())

    def row(self, index: int) -> list[int]:
        """The token ids of one."""
        return list(self.tokens[int(self.starts[index]) : int(self.starts[index + 1])].tolist())

    def subset(self, chosen: Sequence[int]) -> Conversations:
        """Those of these indices, in that order."""
        pieces = [slice(int(self.starts[i]), int(self.starts[i + 1])) for i in chosen]
        return pack(
            ([self.tokens[p] for p in pieces], [self.answer[p] for p in pieces], [self.forked[p] for p in pieces]),
            self.greedy[torch.tensor(list(chosen), dtype=torch.int64)],
        )

    def save(self, file: Path) -> None:
        """Write to a file that appears only when it is complete."""
        part = file.with_suffix(".part")
        save_file({name: getattr(self, name) for name in self.__slots__}, part)
        part.replace(file)

    @classmethod
    def load(cls, file: Path) -> Conversations:
        """What `save` wrote; ConfigError when it is not that."""
        try:
            return cls(**load_file(file))
        except (OSError, SafetensorError, TypeError) as error:
            raise ConfigError(
                f"{file} holds no conversations: {error}", remedy="delete it, or use another --out"
            ) from error


def pack(rows: tuple[Sequence[torch.Tensor], ...], greedy: torch.Tensor) -> Conversations:
    """Conversations of rows (tokens, answer, forked), one tensor each."""
    tokens, answer, forked = rows
    starts = torch.tensor([0, *(len(row) for row in tokens)]).cumsum(0)
    if not tokens:
        empty = torch.zeros(0, dtype=torch.bool)
        return Conversations(torch.zeros(0, dtype=torch.int32), empty, empty, starts, greedy)
    return Conversations(
        torch.cat(list(tokens)).to(torch.int32), torch.cat(list(answer)), torch.cat(list(forked)), starts, greedy
    )


def read_jsonl(path: Path, tokenizer: Tokenizer, *, max_length: int) -> Conversations:
    """Conversations `{"messages": [...]}`, one a line, as the model's chat template writes them; ConfigError names
    file and line. What follows the last answer, or `max_length`, is cut off."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    rows = [_marked(_messages(line, f"{path}, line {i}"), tokenizer, f"{path}, line {i}", max_length)
            for i, line in enumerate(lines, 1) if line.strip()]  # fmt: skip
    kept = [row for row in rows if row is not None]
    if not kept:
        raise ConfigError(
            f"{path} holds no answers to learn from", remedy='give lines of {"messages": [...]} with answers'
        )
    return pack(
        ([r[0] for r in kept], [r[1] for r in kept], [torch.zeros_like(r[1]) for r in kept]),
        torch.zeros(len(kept), dtype=torch.bool),
    )


def _messages(line: str, where: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{where} has no messages", remedy='write {"messages": [{"role": "user", "content": ...}, ...]}'
        )
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(f"{where} has a message without role or content")
    return messages


def _marked(
    messages: list[dict[str, Any]], tokenizer: Tokenizer, where: str, max_length: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens and answer marks of one conversation, None without an answer. Rendered turn by turn, because only so do
    we know which tokens are whose."""
    tokens: list[int] = []
    answer: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], where, prompt=True)
        text = _render(tokenizer, messages[: i + 1], where, prompt=False)
        if text[: len(prompt)] != prompt or prompt[: len(tokens)] != tokens:
            return _cut(tokens, answer, max_length)  # the template rewrites history: keep what is certain
        answer += [False] * (len(prompt) - len(tokens)) + _own(text[len(prompt) :], tokenizer)
        tokens = text
    return _cut(tokens, answer, max_length)


def _own(tokens: list[int], tokenizer: Tokenizer) -> list[bool]:
    """Of the rendered answer, what the model would write: up to its end-of-turn token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in tokenizer.eos_ids), len(tokens))
    return [i < end for i in range(len(tokens))]


def _cut(tokens: list[int], answer: list[bool], max_length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    marks = torch.tensor(answer[:max_length], dtype=torch.bool)
    return (torch.tensor(tokens[:max_length], dtype=torch.int32), marks) if bool(marks.any()) else None


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], where: str, *, prompt: bool) -> list[int]:
    try:
        return tokenizer.chat.render(messages, add_generation_prompt=prompt)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error


def split(conversations: Conversations, held_out: float, seed: int) -> tuple[Conversations, Conversations]:
    """Conversations to learn from, and a random share (one at least, if there are two) to be judged by."""
    order = torch.randperm(len(conversations), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(held_out * len(order))), len(order) - 1) if held_out else 0
    return conversations.subset(order[count:]), conversations.subset(order[:count])


def check_vocabulary(conversations: Iterable[Conversations], vocab_size: int) -> None:
    """ConfigError when tokens do not exist in a model's vocabulary."""
    for each in conversations:
        top = int(each.tokens.max()) if len(each.tokens) else 0
        if top >= vocab_size:
            raise ConfigError(
                f"the text holds token {top}, the target's vocabulary ends at {vocab_size - 1}",
                remedy="use the target's own tokenizer",
            )
