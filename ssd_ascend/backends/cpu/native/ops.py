"""`NativeOps`: the operators of `backends.base.Ops` on the compiled kernels; used by `CpuBackend`.

Each has the same meaning as in `cpu/ops.py`, and hands over to it what the kernels do not know (other storage types,
unusual layouts). A row's result does not depend, in any bit, on the rows beside it.
"""

from __future__ import annotations

from ctypes import addressof

import torch

from ssd_ascend.backends.base import Linear
from ssd_ascend.backends.cpu.native.library import DTYPES, Library, LinearArgs
from ssd_ascend.backends.cpu.ops import PlainOps

_threads = torch.get_num_threads


class PackedLinear:
    """One weight [out, in] (and bias) in the kernels' layout; called with [..., in] gives [..., out]."""

    __slots__ = ("_address", "_arguments", "_bias", "_function", "_panels", "_size")

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = weight.detach().contiguous()
        outputs, inputs = weight.shape
        self._panels = torch.empty(library.packed_size(outputs, inputs), dtype=weight.dtype)
        library.pack(
            weight.data_ptr(), outputs, inputs, DTYPES[weight.dtype], self._panels.data_ptr(), _threads()
        )  # fmt: skip
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._arguments = LinearArgs(
            self._panels.data_ptr(), None if self._bias is None else self._bias.data_ptr(), outputs, inputs,
            DTYPES[weight.dtype],
        )  # fmt: skip
        self._address = addressof(self._arguments)
        self._function = library.linear
        self._size = (inputs, outputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inputs, outputs = self._size
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], outputs)
        rows, width = x.shape
        if width != inputs:
            raise ValueError(f"a linear of {inputs} inputs was given {tuple(x.shape)}")
        x = x.contiguous()
        out = torch.empty(rows, outputs, dtype=x.dtype)
        self._function(self._address, x.data_ptr(), out.data_ptr(), rows, DTYPES[x.dtype], _threads())
        return out


class NativeOps(PlainOps):
    """`backends.base.Ops` on compiled kernels; rotary and add_rms_norm work in place."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Pack the weight; the caller may then drop it."""
        if weight.dtype not in DTYPES or not weight.numel():
            return super().linear(weight, bias)
        return PackedLinear(self._library, weight, bias)

    def vocab_head(self, weight: torch.Tensor) -> Linear:
        """The kernel reads 16-bit weights and gives the type of its input: widening the input is all it takes."""
        project = self.linear(weight, None)
        return lambda x: project(x.float())

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension; x may be a [T, heads, D] view into a packed projection."""
        if x.dtype not in DTYPES or weight.dtype != x.dtype or not weight.is_contiguous():
            return super().rms_norm(x, weight, eps)
        size = x.shape[-1]
        inner, stride = 1, size
        if not x.is_contiguous():
            if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
                inner, stride = x.shape[1], x.stride(0)
            else:
                x = x.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._library.rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, inner, stride, size, eps,
            DTYPES[x.dtype], _threads(),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) for s = x + residual; s overwrites `residual`."""
        dtype = x.dtype
        if dtype not in DTYPES or residual.dtype != dtype or weight.dtype != dtype or not residual.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        x, weight = x.contiguous(), weight.contiguous()
        size = x.shape[-1]
        out = torch.empty_like(x)
        self._library.add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps,
            DTYPES[dtype], _threads(),
        )  # fmt: skip
        return out, residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2*I] -> silu(first half) * second half, [T, I]."""
        if x.dtype not in DTYPES:
            return super().silu_and_mul(x)
        x = x.contiguous()
        size = x.shape[-1] // 2
        out = x.new_empty((*x.shape[:-1], size))
        self._library.silu_and_mul(
            x.data_ptr(), out.data_ptr(), out.numel() // size, size, DTYPES[x.dtype], _threads()
        )  # fmt: skip
        return out

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] where they lie."""
        if not (_heads_adjacent(q) and _heads_adjacent(k) and q.dtype == k.dtype and q.dtype in DTYPES):
            return super().rotary(q, k, positions, cos_sin)
        if cos_sin.dtype != torch.float32 or positions.dtype != torch.int64:
            return super().rotary(q, k, positions, cos_sin)
        positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
        tokens, q_heads, dim = q.shape
        self._library.rotary(
            q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), tokens, q_heads, k.shape[1],
            q.stride(0), k.stride(0), dim, cos_sin.shape[-1], DTYPES[q.dtype], _threads(),
        )  # fmt: skip
        return q, k

    def top_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R, V] -> the arg-max of each row (the first of equals, a NaN before all) and its value."""
        logits = logits.contiguous()
        rows, size = logits.shape
        tokens, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self._library.top_tokens(
            logits.data_ptr(), tokens.data_ptr(), values.data_ptr(), rows, size, _threads()
        )  # fmt: skip
        return tokens, values


def _heads_adjacent(x: torch.Tensor) -> bool:
    """Whether each token's [H, D] is one piece of memory; the tokens may lie apart (views of a packed projection)."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
