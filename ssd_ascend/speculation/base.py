"""The two axes of speculation as protocols: a `Speculator` says WHEN drafting happens, a `Drafter` says WHAT drafts."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch

from ssd_ascend.core.plan import DecodeRow
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Speculation, Verification
from ssd_ascend.core.stats import SpeculationStats


class FeatureReader(Protocol):
    """The target's captured hidden states of tokens already computed, kept beside the KV blocks they belong to."""

    def read(self, seq: Sequence, start: int, end: int) -> torch.Tensor:
        """Features of positions [start, end) of `seq`: [end - start, n_capture * H]."""
        ...


class Speculator(Protocol):
    """Answers `propose` for the rows of a step. May always decline: an empty row is an ordinary decode step."""

    lookahead: int
    """The most drafts a row can carry."""
    wants_features: bool
    stats: SpeculationStats

    def propose(self, rows: Rows[DecodeRow]) -> Speculation:
        """Drafts for each row, at most `row.max_drafts` of them."""
        ...

    def observe(self, sequences: Rows[Sequence], verification: Verification, features: FeatureReader | None) -> None:
        """The step's outcomes, before the scheduler commits them: row i of `verification` belongs to sequences[i].

        `sequences` still hold the tokens from before the step. First outcomes of new sequences come here too.
        """
        ...

    def release(self, seq_ids: Rows[int]) -> None:
        """Forget sequences that finished, were aborted, or were preempted."""
        ...

    def close(self) -> None:
        """Stop whatever was started."""
        ...
