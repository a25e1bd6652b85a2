"""Drafter `ngram`: what followed the last time the text ended like this. No weights; its drafts are point masses."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from pathlib import Path

import torch

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.runtime.pack import to_device
from ssd_ascend.speculation.base import Branch, BranchChoice, Chain, Drafter, DraftSequence, Foresight, Glue
from ssd_ascend.speculation.ngram import NgramIndex
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup

_MOST_GUESSES = 1024
"""Of a sequence: as many as are asked for."""


def build(setup: DraftSetup) -> Drafter:
    """Made for any target: there is nothing to load."""
    return NgramDrafter(num_target_tokens=setup.target.vocab_size, device=setup.device)


class NgramDrafter:
    """Looks up; never computes."""

    wants_features = False
    to_target: torch.Tensor | None = None

    def __init__(self, *, num_target_tokens: int, device: torch.device) -> None:
        self._num_target_tokens = num_target_tokens
        self._device = device
        self._indexes: dict[int, NgramIndex] = {}

    def _index(self, seq: DraftSequence) -> NgramIndex:
        index = self._indexes.setdefault(seq.key, NgramIndex())
        index.update(seq.token_ids)
        return index

    def chain(self, seqs: Rows[DraftSequence], lookahead: int) -> Chain:
        """The continuation of each sequence, as far as it is known."""
        return self._chain([self._index(seq).propose(lookahead) for seq in seqs], lookahead)

    def _chain(self, found: Rows[Rows[int]], lookahead: int) -> Chain:
        tokens = torch.tensor([[*row, *[0] * (lookahead - len(row))] for row in found], dtype=torch.int64)
        tokens = to_device(tokens.reshape(len(found), lookahead), self._device)
        return Chain(tokens, [len(row) for row in found], None, [False] * len(found), None)

    def glue(self, seqs: Rows[DraftSequence], sent: Rows[Rows[int]], hidden: Rows[torch.Tensor | None]) -> Glue:
        """How often each token followed, as log-counts: what an n-gram knows of the next token after each draft."""
        rows = [(seq, drafts[:j]) for seq, drafts in zip(seqs, sent, strict=True) for j in range(len(drafts) + 1)]
        scores = torch.full((len(rows), self._num_target_tokens), float("-inf"))
        for row, (seq, tail) in enumerate(rows):
            counts = self._index(seq).continuations(tail)
            if counts:
                scores[row, list(counts)] = torch.tensor(list(counts.values()), dtype=torch.float32).log()
        return Glue(scores, None, [len(drafts) + 1 for drafts in sent])

    def branch(
        self,
        branches: Rows[Branch],
        guesses: torch.Tensor,
        glue: Glue,
        sent: Rows[Rows[int]],
        k: int,
        should_stop: Callable[[], bool],
    ) -> Chain:
        """The continuation of each hypothetical text; none where the guess itself was never seen to follow."""
        found = []
        for branch, guess, drafts in zip(branches, guesses.tolist(), sent, strict=True):
            known = bool(glue.scores[branch.glue_row, guess] > float("-inf"))
            found.append(self._index(branch.seq).propose(k, (*drafts[: branch.depth], guess)) if known else [])
        return self._chain(found, k)

    @property
    def whole_chain(self) -> int:
        """See `ForeseeingDrafter`: a longer chain costs no more."""
        return 0

    def foresee(
        self,
        seqs: Rows[DraftSequence],
        sent: Rows[Rows[int]],
        hidden: Rows[torch.Tensor | None],
        k: int,
        choice: BranchChoice,
        *,
        hurry: bool = False,
        meanwhile: Callable[[], None],
    ) -> Foresight:
        """`glue`, `choice` and `branch` without scores over the vocabulary, of which an n-gram knows a few tokens."""
        meanwhile()  # no device works here
        outcomes: list[VerificationOutcome] = []
        found: list[list[int]] = []
        for seq, drafts in zip(seqs, sent, strict=True):
            index = self._index(seq)
            after = [_ranked(index.continuations(drafts[:j]), drafts[j : j + 1]) for j in range(len(drafts) + 1)]
            for depth, rank in choice.picks(len(drafts), self._num_target_tokens - 1, _MOST_GUESSES):
                if rank < len(after[depth]):
                    guess = after[depth][rank]
                    outcomes.append(VerificationOutcome(seq.id, depth, guess))
                    found.append(index.propose(k, (*drafts[:depth], guess)))
        return Foresight(outcomes, found, None)

    def release(self, seq: DraftSequence) -> None:
        """Drop the index."""
        self._indexes.pop(seq.key, None)


def _ranked(counts: dict[int, int], fallen: Rows[int]) -> list[int]:
    """Tokens by how often they followed, but for a draft that was rejected there."""
    return sorted((token for token in counts if token not in fallen), key=lambda token: -counts[token])


def capture_layers(path: Path | None, target: ModelConfig) -> tuple[int, ...]:
    """None: it looks at tokens only, of any vocabulary."""
    return ()


KIND = DrafterKind(build, capture_layers, is_free=True)
