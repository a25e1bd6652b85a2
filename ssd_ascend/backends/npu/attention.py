"""Paged attention on the NPU: one cache write and one fused call for prefill, decode and verify alike.

`npu_fused_infer_attention_score` with packed tokens (TND), paged keys and values, and sparse_mode 3: causal, aligned to
the end of each row's keys. It takes lengths as host integers; in a captured graph they are re-issued by `replan`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch_npu

from ssd_ascend.backends.base import AttentionSpec
from ssd_ascend.backends.npu.graphs import Recorder
from ssd_ascend.backends.npu.ops import gather_angles, rotate
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.errors import ConfigError

BLOCK_SIZE = 128
_GRAIN = 16
_WIDEST = 256
_MASK = 2048


class Lengths(NamedTuple):
    """The host lists of one call: where each row's queries end among the packed tokens, and how many keys it has."""

    query_ends: list[int]
    kv_lens: list[int]


class NpuAttention:
    """`AttentionBackend`, and `RotatingAttention`: the angles of a step are gathered once for all layers."""

    def __init__(self, spec: AttentionSpec, device: torch.device, recorder: Recorder) -> None:
        if spec.block_size != BLOCK_SIZE:
            raise ConfigError(f"the NPU has no KV blocks of {spec.block_size} tokens", remedy=f"use {BLOCK_SIZE}")
        if spec.head_dim > _WIDEST:
            raise ConfigError(f"the NPU's attention has no heads of width {spec.head_dim}; at most {_WIDEST}")
        self.spec = spec
        self._recorder = recorder
        self._padding = -spec.head_dim % _GRAIN
        # 1 means masked; one compressed mask serves every length
        self._mask = torch.ones((_MASK, _MASK), dtype=torch.int8, device=device).triu_(1)
        self._lengths = Lengths([], [])
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._table: torch.Tensor | None = None
        self._workspace: torch.Tensor | None = None
        self._recording, self._step = 0, 0
        self._replayed: dict[int, Lengths] = {}

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """(2, num_blocks, block_size, Hkv, D), and D rounded up to what the operator takes: only toys differ there."""
        return (2, num_blocks, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_dim + self._padding)

    def plan(self, meta: AttentionMetadata) -> None:
        """Turn the host lengths into the operator's lists; what the last step gathered is stale.

        A captured batch may say the most of every row, which is more than all its tokens: then the last rows get less.
        """
        tokens = meta.slot_mapping.shape[0]
        ends = [min(end, tokens) for end in accumulate(meta.query_lens_host)]
        self._lengths = Lengths(ends, list(meta.kv_lens_host))
        self._table = meta.block_table.contiguous()
        self._angles = None
        self._workspace = None
        if self._recorder.is_recording:  # one more row, to which `replan` gives the padding that no idle row owns
            self._table = torch.nn.functional.pad(self._table, (0, 0, 0, 1))
            self._lengths = Lengths([*ends, tokens], [*meta.kv_lens_host, 1])
            self._step = self._step + 1 if self._recording == self._recorder.number else 0
            self._recording = self._recorder.number

    def replan(self, meta: AttentionMetadata, bucket: int) -> None:
        """Note the lengths of the step whose graph replays next."""
        self.replan_step(meta, bucket, 0)

    def replan_step(self, meta: AttentionMetadata, bucket: int, step: int) -> None:
        """Note the lengths of one of its steps: the operator wants every token to be some row's.

        Idle rows share the tokens that are left, the last row has the rest; all see block 0, and nobody sees them.
        """
        ends = list(accumulate(meta.query_lens_host))
        used, longest = ends[-1], meta.block_table.shape[1] * BLOCK_SIZE
        idle, left = meta.block_table.shape[0] - len(ends), bucket - used
        share = left // idle if idle else 0
        spare = left - idle * share
        self._replayed[step] = Lengths(
            [*ends, *(used + share * (i + 1) for i in range(idle)), bucket],
            [*meta.kv_lens_host, *[min(max(share, 1), longest)] * idle, min(max(spare, 1), longest)],
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, layer: int
    ) -> torch.Tensor:
        """Store k, v [T, Hkv, D], then attend with q [T, Hq, D] -> [T, Hq * D] (0 for padding)."""
        if self._padding:
            q, k, v = (torch.nn.functional.pad(x, (0, self._padding)) for x in (q, k, v))
        torch_npu.npu_scatter_pa_kv_cache(
            k.contiguous(), v.contiguous(), kv[0], kv[1], meta.slot_mapping, cache_mode="Norm"
        )
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
        """As `forward` after `Ops.rotary`."""
        if self._angles is None:
            self._angles = gather_angles(positions, cos_sin, q.dtype)
        return self.forward(rotate(q, *self._angles), rotate(k, *self._angles), v, kv, meta, layer)

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        tokens, used = q.shape[0], self._lengths.query_ends[-1]
        assert used <= tokens, "plan() was called for another batch"
        if used == tokens:
            return self._call(q, kv)
        attended = self._call(q[:used], kv)  # padding behind the last row
        return torch.cat((attended, attended.new_zeros(tokens - used, attended.shape[1])))

    def _call(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        tensors = (q.contiguous(), kv[0].flatten(2), kv[1].flatten(2))
        options = self._options()
        if self._recorder.is_recording:
            out = self._capture(tensors, options)
        else:
            out, _ = torch_npu.npu_fused_infer_attention_score(*tensors, **options, **self._lists(self._lengths))
        return (out[..., : self.spec.head_dim] if self._padding else out).flatten(1)

    def _options(self) -> dict[str, Any]:
        """What does not change with the lengths."""
        return {
            "atten_mask": self._mask,
            "block_table": self._table,
            "input_layout": "TND",
            "block_size": self.spec.block_size,
            "num_heads": self.spec.num_heads,
            "num_key_value_heads": self.spec.num_kv_heads,
            "scale": self.spec.scale,
            "sparse_mode": 3,
        }

    @staticmethod
    def _lists(lengths: Lengths) -> dict[str, list[int]]:
        return {"actual_seq_lengths": lengths.query_ends, "actual_seq_lengths_kv": lengths.kv_lens}

    def _capture(self, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> torch.Tensor:
        """The call as a part of the graph that takes its lengths anew at every replay."""
        operator = torch_npu.npu_fused_infer_attention_score
        lists = self._lists(self._lengths)
        if self._workspace is None:  # one for all layers: they run one after the other, and it suits every length
            ask = torch_npu._npu_fused_infer_attention_score_get_max_workspace
            self._workspace = ask(*tensors, **options, **lists)
        out = torch.empty_like(tensors[0])
        lse = torch.empty(1, dtype=torch.float32, device=out.device)
        operator_out = {**options, "workspace": self._workspace, "out": [out, lse]}
        # views without ownership, so that the graph's memory is shared as if nobody would look at them again
        weak = torch_npu._C._weak_ref_tensor
        again = tuple(weak(tensor) for tensor in tensors)
        options_again = {
            name: weak(value) if isinstance(value, torch.Tensor) else value for name, value in operator_out.items()
        } | {"out": [weak(out), weak(lse)]}
        step = self._step
        self._recorder.record(
            launch=lambda: operator.out(*tensors, **operator_out, **lists),
            reissue=lambda: operator.out(*again, **options_again, **self._lists(self._replayed[step])),
        )
        return out
