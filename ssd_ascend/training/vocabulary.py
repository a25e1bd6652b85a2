"""The draft vocabulary: the tokens a head can write, chosen by how often the target writes them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.training.conversations import Conversations


class DraftVocabulary(NamedTuple):
    """to_target int64 [Vd], ascending; to_draft int64 [V], -1 where there is none; covered: share of answer tokens."""

    to_target: torch.Tensor
    to_draft: torch.Tensor
    covered: float

    @property
    def size(self) -> int:
        """Vd."""
        return len(self.to_target)

    def tables(self) -> dict[str, torch.Tensor]:
        """`d2t` (offsets: target id = i + d2t[i]) and `t2d` (which target ids are in), as everybody stores them."""
        return {"d2t": self.to_target - torch.arange(self.size), "t2d": self.to_draft >= 0}


def choose_vocabulary(
    conversations: Conversations, size: int, vocab_size: int, always: frozenset[int] = frozenset()
) -> DraftVocabulary:
    """The `size` most frequent tokens of answers (`always` counts as most frequent); ties go to the lower id."""
    if size > vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {size} exceeds the target's of {vocab_size}", remedy=f"give at most {vocab_size}"
        )
    written = conversations.tokens[conversations.answer].long()
    counts = torch.bincount(written, minlength=vocab_size)
    ranked = counts.clone()
    ranked[torch.tensor(sorted(always), dtype=torch.int64)] = counts.max() + 1
    kept = ranked.argsort(descending=True, stable=True)[:size].sort().values
    covered = float(counts[kept].sum()) / max(1, len(written))
    return vocabulary_of(kept, vocab_size, covered)


def vocabulary_of(to_target: torch.Tensor, vocab_size: int, covered: float = 1.0) -> DraftVocabulary:
    """The vocabulary of these target ids."""
    to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
    to_draft[to_target] = torch.arange(len(to_target))
    return DraftVocabulary(to_target, to_draft, covered)
