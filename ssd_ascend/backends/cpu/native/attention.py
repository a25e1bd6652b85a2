"""`NativeAttention`: paged attention on the compiled kernels, cache store included; used by `CpuBackend`."""

from __future__ import annotations

from ctypes import byref

import torch

from ssd_ascend.backends.base import AttentionSpec
from ssd_ascend.backends.cpu.attention import PlainAttention
from ssd_ascend.backends.cpu.native.library import DTYPES, Library, ShapeArgs, StepArgs
from ssd_ascend.core.attention import AttentionMetadata

_LANES = 8
_threads = torch.get_num_threads


def supports(spec: AttentionSpec) -> bool:
    """Whether the kernels can serve this model; others get `PlainAttention`."""
    return spec.dtype in DTYPES and spec.head_dim % _LANES == 0


class NativeAttention(PlainAttention):
    """`backends.base.AttentionBackend` on compiled kernels: one call stores the new keys and values and attends."""

    def __init__(self, library: Library, spec: AttentionSpec) -> None:
        assert supports(spec), f"no kernels for {spec}"
        super().__init__(spec)
        self._function = library.attention
        self._shape = ShapeArgs(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, DTYPES[spec.dtype], spec.scale
        )  # fmt: skip
        self._planned: AttentionMetadata | None = None
        self._kept: tuple[torch.Tensor | None, ...] = ()
        self._step = StepArgs()

    def plan(self, meta: AttentionMetadata) -> None:
        """Read the step's tensors once, for all layers."""
        query_start, kv_lens = meta.query_start.int().contiguous(), meta.kv_lens.int().contiguous()
        table, slots = meta.block_table.int(), meta.slot_mapping.long().contiguous()
        if table.stride(-1) != 1:
            table = table.contiguous()
        mask = None if meta.tree_mask is None else meta.tree_mask.contiguous()
        self._kept = (query_start, kv_lens, table, slots, mask)  # the addresses below must stay alive
        self._step = StepArgs(
            query_start.data_ptr(), kv_lens.data_ptr(), table.data_ptr(), slots.data_ptr(),
            None if mask is None else mask.data_ptr(), kv_lens.shape[0], slots.shape[0], table.stride(0),
            0 if mask is None else mask.shape[1],
        )  # fmt: skip
        self._planned = meta

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, layer: int
    ) -> torch.Tensor:
        """Store k, v [T, Hkv, D], then attend with q [T, Hq, D] -> [T, Hq * D] (0 for padding)."""
        if meta is not self._planned:
            self.plan(meta)
        spec = self.spec
        if not q.dtype == k.dtype == v.dtype == kv.dtype == spec.dtype or not kv.is_contiguous():
            raise ValueError(f"attention in {spec.dtype} was given {q.dtype}, {k.dtype}, {v.dtype}, cache {kv.dtype}")
        q, k, v = _packed(q), _packed(k), _packed(v)
        out = torch.empty((q.shape[0], spec.num_heads * spec.head_dim), dtype=q.dtype)
        self._function(
            byref(self._step), byref(self._shape), q.data_ptr(), k.data_ptr(), v.data_ptr(), kv.data_ptr(),
            out.data_ptr(), q.shape[0], q.stride(0), k.stride(0), v.stride(0), kv.shape[1], _threads(),
        )  # fmt: skip
        return out


def _packed(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when each token's [H, D] is one piece of memory, else a contiguous copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
