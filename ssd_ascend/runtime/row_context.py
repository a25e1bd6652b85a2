"""What the sampling law at one position depends on besides the logits: parameters, position, history.

Needs no `Sequence`, so a drafter in another process builds the same contexts as the verifier and gets the same law.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence as TokenSequence


class RowContext(NamedTuple):
    """One row of logits: the token to be drawn from it will stand at `position`, so `position` tokens come before it.

    `token_ids` are the committed tokens and `tail` (int64 [position - len(token_ids)], on the device) the drafts after
    them; both are read for penalties only. `drafts` are the same drafts on the host, for grammars. `temperature`
    overrides that of `params` (a draft may be hotter or colder).
    A tuple, because a step makes one per row and frozen dataclasses take four times as long.
    """

    params: SamplingParams
    seed: int
    position: int
    num_prompt_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    seq_id: int = -1
    token_ids: Sequence[int] = ()
    tail: torch.Tensor | None = None
    drafts: Sequence[int] = ()

    @staticmethod
    def of(
        seq: TokenSequence, *, offset: int = 0, tail: torch.Tensor | None = None, drafts: Sequence[int] = ()
    ) -> RowContext:
        """The row that draws the token after `seq` and `offset` drafts: `tail` when penalties matter, `drafts` when a
        grammar does."""
        return RowContext(
            params=seq.sampling,
            seed=seq.seed,
            position=len(seq.token_ids) + offset,
            num_prompt_tokens=seq.num_prompt_tokens,
            stop_ids=seq.stop_ids,
            seq_id=seq.id,
            token_ids=seq.token_ids,
            tail=tail,
            drafts=drafts,
        )

    @property
    def law_temperature(self) -> float:
        """The temperature in force."""
        return self.params.temperature if self.temperature is None else self.temperature

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens before this one, drafts included."""
        return self.position - self.num_prompt_tokens

    @property
    def bans_stops(self) -> bool:
        """True while `min_tokens` keeps the answer from ending."""
        return bool(self.stop_ids) and self.num_output_tokens < self.params.min_tokens


@dataclass(slots=True)
class _Entry:
    """One sequence: times each token was generated [V], whether the prompt holds it [V], and how far it was read."""

    generated: torch.Tensor
    prompted: torch.Tensor
    num_read: int = 0


class TokenCounts:
    """How often each token occurs in each sequence that asked for a penalty, grown as its tokens grow."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._entries)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences; unknown ids are fine."""
        for seq_id in seq_ids:
            self._entries.pop(seq_id, None)

    def gather(self, rows: Sequence[RowContext], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Occurrences before each row: (generated float32 [P, V], prompted bool [P, V]), `like` giving V and device.

        Row by row the drafts in `tail` count as generated: the law at a position knows every token before it.
        """
        entries = [self._read(row, like) for row in rows]
        generated = torch.stack([entry.generated for entry in entries])
        prompted = torch.stack([entry.prompted for entry in entries])
        tails = [(i, row.tail) for i, row in enumerate(rows) if row.tail is not None and row.tail.numel()]
        if tails:
            vocab = generated.shape[1]
            tokens = torch.cat([tail for _, tail in tails])
            owner_ids = [i for i, tail in tails for _ in range(tail.numel())]
            owners = torch.tensor(owner_ids, dtype=torch.int64, device=like.device)
            in_vocab = (tokens >= 0) & (tokens < vocab)  # a broken drafter may send anything; its rows fail later
            places = (owners, tokens.clamp(0, vocab - 1))
            generated.index_put_(places, in_vocab.to(torch.float32), accumulate=True)
        return generated, prompted

    def _read(self, row: RowContext, like: torch.Tensor) -> _Entry:
        """The entry of a row's sequence, caught up with its tokens."""
        entry = self._entries.get(row.seq_id)
        if entry is None or entry.num_read > len(row.token_ids):  # an id that starts over is a new sequence
            vocab = like.shape[-1]
            generated = torch.zeros(vocab, dtype=torch.float32, device=like.device)
            prompted = torch.zeros(vocab, dtype=torch.bool, device=like.device)
            entry = self._entries[row.seq_id] = _Entry(generated, prompted)
        start, end = entry.num_read, len(row.token_ids)
        if start < end:
            split = min(max(row.num_prompt_tokens, start), end)
            prompt = torch.tensor(row.token_ids[start:split], dtype=torch.int64, device=like.device)
            output = torch.tensor(row.token_ids[split:end], dtype=torch.int64, device=like.device)
            entry.prompted.index_fill_(0, prompt, value=True)
            entry.generated.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
            entry.num_read = end
        return entry
