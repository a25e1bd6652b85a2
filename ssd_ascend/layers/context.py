"""`BuildContext`: the one thing a model takes beside its own config."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssd_ascend.backends.base import AttentionBackend, Collectives, Ops


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Where and with what a model is built. `attention` is shared by all layers of the model.

    dtype: of the weights. activations: of everything that flows, keys and values included; None for the same.
    """

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    attention: AttentionBackend
    collectives: Collectives
    activations: torch.dtype | None = None

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return self.activations or self.dtype
