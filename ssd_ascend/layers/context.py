"""`BuildContext`: the one thing a model takes beside its own config."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssd_ascend.backends.base import AttentionBackend, Collectives, Ops


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Where and with what a model is built. `attention` is shared by all layers of the model."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    attention: AttentionBackend
    collectives: Collectives
