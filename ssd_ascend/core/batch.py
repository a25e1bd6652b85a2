"""One forward pass of one model, as a value. Torch appears in annotations only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ssd_ascend.core.attention import AttentionMetadata

if TYPE_CHECKING:
    import torch


class Mode(enum.StrEnum):
    """What a forward is for: selects a captured graph, never a kernel."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    GLUE = "glue"
    BRANCH = "branch"


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T packed tokens of B rows.

    input_ids, positions: int64 [T]. hidden_states: None, or [T, H_in] features fed beside the token embedding
    (EAGLE-3). logits_rows: None (a logit row for every token), or int64 [R]: the packed rows whose logits are wanted.
    """

    mode: Mode
    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    hidden_states: torch.Tensor | None = None
    logits_rows: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids.shape[0])


class Awaited(Protocol):
    """Numbers on their way from the device to the host."""

    def is_there(self) -> bool:
        """Whether `rows` need not wait any more."""
        ...

    def rows(self) -> list[list[int]]:
        """All of them, as soon as they are there."""
        ...


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What one forward gives back.

    logits: float32 [R, V]. hidden: the recyclable last hidden state of those R rows, pre-norm [R,
    H], or None when the architecture gives none. features: captured hidden states of all T tokens, [T, n*H], or None.
    greedy: None, or int64 [R, 2] from a captured step: the arg-max of each row of logits, -1 where it is no finite
    number, and the token fed there. All that a greedy step is judged by, ready for one copy to the host.
    verdict: the same, where that copy is on its way already, as it is only where nobody wants to know more.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    features: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    verdict: Awaited | None = None
