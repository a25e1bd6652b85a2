"""Plain torch operators: the reference every other backend's are tested against, and what they may fall back to.

Each computes in float32 and rounds once, to the dtype of its input. They run on any device torch knows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ssd_ascend.backends.base import Linear


class PlainOps:
    """`backends.base.Ops` in plain torch. Nothing works in place."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """[T, in] -> [T, out] by torch's own matrix product."""

        def apply(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight, bias)

        return apply

    def vocab_head(self, weight: torch.Tensor) -> Linear:
        """[T, H] -> float32 [T, V], accumulated and kept in float32."""
        wide = weight.float()

        def apply(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x.float(), wide)

        return apply

    def embedding(self, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of weight [V, H] for ids [T] -> [T, H]."""
        return F.embedding(ids, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) for s = x + residual, rounded to x.dtype before it is normalised."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2*I] -> silu(first half) * second half, [T, I]."""
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the halves of the first rotary_dim of D; q: [T, Hq, D], k: [T, Hkv, D], cos_sin: [P, rotary_dim]."""
        cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2] each
        return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)
