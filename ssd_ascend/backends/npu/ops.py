"""`NpuOps`: the small operators on the NPU, fused where CANN has them; `backends/cpu/ops.py` is the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_npu

from ssd_ascend.backends.base import Linear


class NpuOps:
    """`backends.base.Ops`. Weights stay in the plain ND format: NZ changes how views and copies behave."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """[T, in] -> [T, out]."""
        weight = weight.contiguous()

        def apply(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight, bias)

        return apply

    def vocab_head(self, weight: torch.Tensor) -> Linear:
        """[T, H] -> float32 [T, V]: the product accumulates in float32 and is not rounded on its way out.

        Where this torch_npu cannot do that, it is rounded, which only makes more ties.
        """
        columns = weight.contiguous().t()
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "PrivateUse1"):
            return lambda x: torch.mm(x, columns).float()
        return lambda x: torch.mm(x, columns, out_dtype=torch.float32)

    def embedding(self, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of weight [V, H] for ids [T] -> [T, H]."""
        return F.embedding(ids, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        normed: torch.Tensor = torch_npu.npu_rms_norm(x, weight, eps)[0]
        return normed

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) for s = x + residual, rounded to x.dtype before it is normalised."""
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2*I] -> silu(first half) * second half, [T, I]."""
        result: torch.Tensor = torch_npu.npu_swiglu(x, dim=-1)
        return result

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the halves of the first rotary_dim of D; q: [T, Hq, D], k: [T, Hkv, D]."""
        angles = gather_angles(positions, cos_sin, q.dtype)
        return rotate(q, *angles), rotate(k, *angles)


def gather_angles(
    positions: torch.Tensor, cos_sin: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the tokens, each [1, T, 1, rotary_dim] as the operator wants them: its halves repeat."""
    cos, sin = cos_sin.index_select(0, positions).to(dtype).chunk(2, dim=-1)
    return tuple(torch.cat((half, half), dim=-1)[None, :, None, :] for half in (cos, sin))  # type: ignore[return-value]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first rotary_dim of x [T, N, D] turned by the angles; the rest passes through."""
    width = cos.shape[-1]
    turned: torch.Tensor = torch_npu.npu_rotary_mul(x[None, :, :, :width], cos, sin)[0]
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
