"""`CudaOps`: the small operators on the GPU, each one Triton launch; `backends/cpu/ops.py` is the reference."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from ssd_ascend.backends.base import Experts, Linear
from ssd_ascend.backends.cuda.experts import grouped_experts, is_exact
from ssd_ascend.backends.cuda.kernels import choice, small
from ssd_ascend.backends.cuda.kernels.advance import advance
from ssd_ascend.backends.cuda.kernels.linear import FewRows, linear
from ssd_ascend.backends.cuda.kernels.top_few import top_few
from ssd_ascend.core.advance import Advance
from ssd_ascend.errors import first_line
from ssd_ascend.log import get_logger

_log = get_logger(__name__)
_AHEAD = 128
"""Numbers of every weight row fetched while the kernel before still runs (measured: 128 and 256 help, 1024 hurts)."""
_HOPPER = 9
"""Major number of its compute capability."""


class CudaOps:
    """`backends.base.Ops`. `overlap`: let each kernel start while its predecessor still runs; `bulk`: load matrices
    through the bulk copy engine (both Hopper and newer)."""

    def __init__(self, *, overlap: bool, bulk: bool) -> None:
        self._overlap = overlap
        self._bulk = bulk
        self._ahead = _AHEAD if overlap else 0
        self._few_rows: dict[torch.device, FewRows | None] = {}
        self._exact_experts: dict[tuple[torch.Size, torch.device], bool] = {}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """[T, in] -> [T, out]; a row's bits do not depend on T."""
        return self._product(weight.contiguous(), bias)

    def vocab_head(self, weight: torch.Tensor) -> Linear:
        """`linear` whose float32 sums are kept as they are."""
        return self._product(weight.contiguous(), None, dtype=torch.float32)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """silu(gate) * up of weight's first and second half of rows, in one launch; bits as of the two in turn."""
        return self._product(_alternate(weight), None if bias is None else _alternate(bias), gated=True)

    def _product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False, dtype: torch.dtype | None = None
    ) -> Linear:
        device = weight.device
        if device not in self._few_rows:
            self._few_rows[device] = few_rows_on(device, overlap=self._overlap) if self._bulk else None
        return partial(
            linear,
            weight=weight,
            bias=bias,
            overlap=self._overlap,
            bulk=self._bulk,
            ahead=self._ahead,
            gated=gated,
            dtype=dtype,
            few_rows=self._few_rows[device],
        )

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts | None:
        """The library's grouped product, where it is exact; see `cuda/experts.py`. It knows bfloat16 only."""
        if gate_up.dtype is not torch.bfloat16:
            return None
        run = grouped_experts(gate_up, down, self.silu_and_mul)
        shape = (gate_up.shape, gate_up.device)
        if shape not in self._exact_experts:
            found = is_exact(run, *gate_up.shape[::2], dtype=gate_up.dtype, device=gate_up.device)
            self._exact_experts[shape] = found
            _log.info("experts of %s run %s", tuple(gate_up.shape), "grouped" if found else "one by one")
        return run if self._exact_experts[shape] else None

    def top_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The arg-max of every row [R, V] and its value."""
        return choice.top_tokens(logits, overlap=self._overlap)

    def top_few(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """The likeliest tokens of every row [R, V], best first: [R, count]."""
        return top_few(logits, count, overlap=self._overlap)

    def advance(self, to: Advance) -> None:
        """The next round's numbers from a verdict."""
        advance(to, overlap=self._overlap)

    def embedding(self, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of weight [V, H] for ids [T] -> [T, H]."""
        return F.embedding(ids, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        return small.rms_norm(x, None, weight, eps, overlap=self._overlap)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) for s = x + residual, rounded to x.dtype before it is normalised; s replaces residual."""
        return small.rms_norm(x, residual, weight, eps, overlap=self._overlap), residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2*I] -> silu(first half) * second half, [T, I]."""
        return small.silu_and_mul(x, overlap=self._overlap)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the halves of the first rotary_dim of D in place; q: [T, Hq, D], k: [T, Hkv, D]."""
        small.rotary(q, k, positions, cos_sin, overlap=self._overlap)
        return q, k


def few_rows_on(device: torch.device, *, overlap: bool) -> FewRows | None:
    """The kernel for few rows on this GPU; None where it cannot be: its instructions are Hopper's. There it is tried
    out, as its language is experimental: without narrow tiles, or None, and a line, where it does not run or does not
    give `linear`'s bits."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    for narrow, what in ((True, "narrow tiles for few rows are"), (False, "the kernel for few rows is")):
        try:
            from ssd_ascend.backends.cuda.kernels.few_rows import few_rows

            processors = torch.cuda.get_device_properties(device).multi_processor_count
            run = partial(few_rows, processors=processors, narrow=narrow)
            shapes = ((3, 200), (20, 200), (3, 64 * processors))
            if all(_same_bits(run, *shape, device, overlap=overlap) for shape in shapes):
                return run
            why = "the bits are others"
        except Exception as error:  # noqa: BLE001  whatever a compiler in the making raises
            why = first_line(error)
        _log.info("%s not used: %s", what, why)
    return None


def _same_bits(run: FewRows, rows: int, columns: int, device: torch.device, *, overlap: bool) -> bool:
    """Whether it agrees with `linear`."""
    draw = torch.Generator(device).manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
        for shape in ((rows, 2056), (columns, 2056), (columns,))
    )
    expected = linear(x, weight, bias, overlap=overlap, bulk=True, gated=True)
    return torch.equal(linear(x, weight, bias, overlap=overlap, bulk=True, gated=True, few_rows=run), expected)


def _alternate(packed: torch.Tensor) -> torch.Tensor:
    """Rows 0, 1, 2, ... of the first and of the second half in turn: a tile then holds gates beside their ups."""
    return packed.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()
