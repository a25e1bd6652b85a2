"""`PagedAttention`: attention on the GPU. `kernels/attention.py` says why its results never depend on batching.

The device plans its own work (`plan_work`) from device lengths, so a captured step needs nothing from the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from ssd_ascend.backends.base import AttentionSpec
from ssd_ascend.backends.cuda.kernels import attention as kernels
from ssd_ascend.backends.cuda.kernels.launch import launch
from ssd_ascend.backends.cuda.kernels.small import rotate_and_store, store_kv
from ssd_ascend.backends.cuda.kernels.work import WORK, plan_work
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.errors import ConfigError

_LONGEST = 64
"""Rows of more queries are prefilled by programs that walk all keys; shorter ones are split over keys."""
_UNBOUNDED = 1 << 30
_TOGETHER = 8
"""Key tiles that one program goes over where rows alone keep the device busy (docs/performance.md)."""
_PROGRAMS_PER_PROCESSOR = 4
_MANY_HEADS = 4096
"""Above so many heads of tokens, one program of `merge` does several: most have nothing to add up."""
_CHUNK = 128


class _Step(NamedTuple):
    """What `plan` made for one step. `parts` are None when no row is short."""

    meta: AttentionMetadata
    longest: int
    together: int
    block_m: int
    max_tiles: int
    programs: int
    num_long: int
    work: torch.Tensor
    work_count: torch.Tensor
    token_row: torch.Tensor
    part_sum: torch.Tensor
    part_top: torch.Tensor


class PagedAttention:
    """`backends.base.AttentionBackend` over a cache [2, num_blocks, block_size, Hkv, D]."""

    def __init__(self, spec: AttentionSpec, device: torch.device, *, processors: int, overlap: bool) -> None:
        self.spec = spec
        self._device = device
        self._overlap = overlap
        self._processors = processors
        self._most_programs = processors * _PROGRAMS_PER_PROCESSOR
        self._group = spec.num_heads // spec.num_kv_heads
        self._block_d = max(16, triton.next_power_of_2(spec.head_dim))
        self._tile = 32 if spec.dtype.itemsize > 2 else 64 if self._block_d > 128 else 128
        self._step: _Step | None = None
        if self._group > 64 or spec.head_dim > 256:
            raise ConfigError(
                f"{self._group} query heads a key-value head, {spec.head_dim} wide: this device's attention takes at "
                "most 64 and 256",
                remedy="serve another model, or use --device cpu",
            )

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """(2, num_blocks, block_size, Hkv, D)."""
        return (2, num_blocks, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def workspace_bytes(self, tokens: int, max_len: int) -> int:
        """Weighted values, sums and maxima of every tile of keys, for every token and head."""
        return 4 * tokens * self.spec.num_heads * triton.cdiv(max_len, self._tile) * (self.spec.head_dim + 2)

    def plan(self, meta: AttentionMetadata) -> None:
        """List the step's work on the device. Captured with a step, so that each replay lists its own."""
        longest = _LONGEST if meta.tree_mask is None else _UNBOUNDED
        short = [
            (q, kv) for q, kv in zip(meta.query_lens_host, meta.kv_lens_host, strict=True) if 0 < q <= longest and kv
        ]
        block_m = self._block_rows(max((q for q, _ in short), default=1))
        max_tiles = max((triton.cdiv(kv, self._tile) for _, kv in short), default=1)
        per_block = block_m // self._group
        work = sum(triton.cdiv(q, per_block) * triton.cdiv(kv, self._tile) for q, kv in short)
        blocks = sum(triton.cdiv(q, per_block) for q, _ in short)
        tokens = meta.slot_mapping.shape[0]
        parts = (tokens, self.spec.num_heads, max_tiles) if short else (0, 0, 0)
        integers = torch.empty(WORK * work + tokens + 1, dtype=torch.int32, device=self._device)
        step = _Step(
            meta=meta,
            longest=longest,
            together=_TOGETHER if blocks * self.spec.num_kv_heads >= self._processors else 0,
            block_m=block_m,
            max_tiles=max_tiles,
            programs=min(work * self.spec.num_kv_heads, self._most_programs),
            num_long=sum(q > longest for q in meta.query_lens_host),
            work=integers[: WORK * work],
            token_row=integers[WORK * work : -1],
            work_count=integers[-1:],
            part_sum=torch.empty((*parts, self.spec.head_dim), dtype=torch.float32, device=self._device),
            part_top=torch.empty((*parts, 2), dtype=torch.float32, device=self._device),
        )
        self._step = step
        if short:
            self._launch_plan(step, tokens)

    def replan(self, meta: AttentionMetadata, bucket: int) -> None:
        """Nothing to re-issue: lengths live on the device."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, layer: int
    ) -> torch.Tensor:
        """Store k, v [T, Hkv, D], then attend with q [T, Hq, D] -> [T, Hq * D] (0 for padding)."""
        store_kv(k, v, kv, meta.slot_mapping, overlap=self._overlap)
        return self._attend(q, kv, meta)

    def forward_rotated(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        layer: int,
    ) -> torch.Tensor:
        """As `forward` after `Ops.rotary`, with one launch for rotation and store; q is rotated in place."""
        rotate_and_store(q, k, v, positions, cos_sin, kv, meta.slot_mapping, overlap=self._overlap)
        return self._attend(q, kv, meta)

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        step = self._step
        assert step is not None, "plan() was not called"
        assert step.meta is meta, "plan() was called for another batch"
        tokens = q.shape[0]
        new = torch.empty if step.programs else torch.zeros
        out = new((tokens, self.spec.num_heads * self.spec.head_dim), dtype=q.dtype, device=q.device)
        if step.programs:
            self._split(q, kv, out, step)
            self._merge(out, step)
        if step.num_long:
            self._whole(q, kv, out, step)
        return out

    def _block_rows(self, queries: int) -> int:
        """Rows of a block of queries times heads: the work of one program.

        At most 32: blocks of 64 would take the other kind of tensor core instructions (docs/performance.md, exactness).
        """
        return max(self._group_floor(), min(32, triton.next_power_of_2(queries * self._group)))

    def _group_floor(self) -> int:
        return max(16, triton.next_power_of_2(self._group))

    def _launch_plan(self, step: _Step, tokens: int) -> None:
        rows = step.meta.query_start.shape[0] - 1
        launch(
            plan_work,
            (rows + 1,),
            step.meta.query_start,
            step.meta.kv_lens,
            step.work,
            step.token_row,
            step.work_count,
            rows,
            tokens,
            TILE=self._tile,
            QUERIES=step.block_m // self._group,
            LONGEST=step.longest,
            TOGETHER=step.together,
            ROWS=triton.next_power_of_2(rows + 1),
            CHUNK=_CHUNK,
            OVERLAP=self._overlap,
            num_warps=4,
            launch_pdl=self._overlap,
        )

    def _split(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, step: _Step) -> None:
        meta, spec = step.meta, self.spec
        tree = None if meta.tree_mask is None else meta.tree_mask.contiguous().view(torch.uint8)
        launch(
            kernels.split,
            (step.programs,),
            q,
            kv,
            meta.block_table,
            meta.query_start,
            meta.kv_lens,
            tree,
            step.work,
            step.work_count,
            step.part_sum,
            step.part_top,
            out,
            spec.scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            meta.block_table.stride(0),
            kv.stride(0),
            0 if tree is None else tree.shape[1],
            step.max_tiles,
            KV_HEADS=spec.num_kv_heads,
            GROUP=self._group,
            WIDTH=spec.head_dim,
            BLOCK_D=self._block_d,
            BLOCK_M=step.block_m,
            TILE=self._tile,
            TOGETHER=step.together > 0,
            BLOCK_SIZE=spec.block_size,
            LINES=triton.next_power_of_2(triton.cdiv(spec.head_dim, kernels.LINE)),
            OVERLAP=self._overlap,
            num_warps=4,
            num_stages=2 if step.together else 1,
            launch_pdl=self._overlap,
        )

    def _merge(self, out: torch.Tensor, step: _Step) -> None:
        spec, meta = self.spec, step.meta
        tokens = out.shape[0]
        at_once = 1 if tokens * spec.num_heads <= _MANY_HEADS else 8
        launch(
            kernels.merge,
            (tokens, triton.cdiv(spec.num_heads, at_once)),
            step.part_sum,
            step.part_top,
            out,
            step.token_row,
            meta.query_start,
            meta.kv_lens,
            step.max_tiles,
            HEADS=spec.num_heads,
            AT_ONCE=at_once,
            WIDTH=spec.head_dim,
            BLOCK_D=self._block_d,
            TILE=self._tile,
            CAUSAL=meta.tree_mask is None,
            LANES=32,
            OVERLAP=self._overlap,
            num_warps=1,
            launch_pdl=self._overlap,
        )

    def _whole(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, step: _Step) -> None:
        meta, spec = step.meta, self.spec
        block_m = max(self._group_floor(), 64 if spec.dtype.itemsize <= 2 else 32)
        blocks = triton.cdiv(meta.max_query_len, block_m // self._group)
        launch(
            kernels.whole,
            (blocks, spec.num_kv_heads, meta.query_start.shape[0] - 1),
            q,
            kv,
            meta.block_table,
            meta.query_start,
            meta.kv_lens,
            out,
            spec.scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            meta.block_table.stride(0),
            kv.stride(0),
            KV_HEADS=spec.num_kv_heads,
            GROUP=self._group,
            WIDTH=spec.head_dim,
            BLOCK_D=self._block_d,
            BLOCK_M=block_m,
            TILE=self._tile,
            BLOCK_SIZE=spec.block_size,
            LONGEST=step.longest,
            OVERLAP=self._overlap,
            num_warps=4,
            num_stages=2,
            launch_pdl=self._overlap,
        )
