"""RMSNorm, with the fused form that also carries the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.slots import Slot


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self._ctx = ctx
        self._size = size
        self._eps = eps
        self.weight: torch.Tensor | None = None  # a plain attribute: inference needs no parameters

    def slots(self, path: str) -> Iterator[Slot]:
        """The weight."""
        if self.weight is None:
            yield Slot(f"{path}.weight", (self._size,), self._take)

    def _take(self, tensor: torch.Tensor) -> None:
        self.weight = tensor.to(self._ctx.device, self._ctx.activation_dtype, copy=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        assert self.weight is not None
        return self._ctx.ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); `residual` must not be used again."""
        assert self.weight is not None
        return self._ctx.ops.add_rms_norm(x, residual, self.weight, self._eps)
