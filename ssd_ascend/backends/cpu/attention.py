"""Paged attention in plain torch: the reference for every backend's, readable before fast.

A layer's KV tensor is [2, num_blocks, block_size, Hkv, D]: keys and values are each contiguous, which the NPU's
operators need, so all backends can share one cache layout.
"""

from __future__ import annotations

import torch

from ssd_ascend.backends.base import AttentionSpec
from ssd_ascend.core.attention import AttentionMetadata

_QUERY_CHUNK = 256
"""Queries scored at once: bounds the [H, queries, keys] float32 scores of a long prefill."""


class PlainAttention:
    """`backends.base.AttentionBackend` in plain torch; scores, softmax and sums in float32."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """(2, num_blocks, block_size, Hkv, D)."""
        return (2, num_blocks, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def plan(self, meta: AttentionMetadata) -> None:
        """Nothing to prepare."""

    def replan(self, meta: AttentionMetadata, bucket: int) -> None:
        """Nothing to re-issue: there are no captured graphs."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, layer: int
    ) -> torch.Tensor:
        """Store k, v [T, Hkv, D], then attend with q [T, Hq, D] -> [T, Hq * D] (0 for padding)."""
        store_kv(k, v, kv, meta.slot_mapping)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        starts = meta.query_start.tolist()
        for row, kv_len in enumerate(meta.kv_lens.tolist()):
            start, num_queries = starts[row], starts[row + 1] - starts[row]
            keys, values = gather_kv(kv, meta.block_table[row], kv_len)
            for first in range(0, num_queries, _QUERY_CHUNK):
                last = min(first + _QUERY_CHUNK, num_queries)
                seen = _visible(meta, start, first, last, num_queries, kv_len, q.device)
                rows = slice(start + first, start + last)
                out[rows] = _attend(q[rows], keys, values, seen, self.spec.scale)
        return out.flatten(1)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k, v [T, Hkv, D] into kv [2, blocks, block_size, Hkv, D] at their slots; slot -1 is skipped."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    flat = kv.view(2, -1, *kv.shape[3:])
    flat[0, slots] = k[: kept.shape[0]][kept].to(kv.dtype)
    flat[1, slots] = v[: kept.shape[0]][kept].to(kv.dtype)


def gather_kv(kv: torch.Tensor, blocks: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first kv_len keys and values of one row, [kv_len, Hkv, D] each, through its block table."""
    used = blocks[: -(-kv_len // kv.shape[2])].long()
    return kv[0, used].flatten(0, 1)[:kv_len], kv[1, used].flatten(0, 1)[:kv_len]


def _visible(
    meta: AttentionMetadata, start: int, first: int, last: int, num_queries: int, kv_len: int, device: torch.device
) -> torch.Tensor:
    """bool [last - first, kv_len]: what queries first..last of a row whose packed tokens begin at `start` may see."""
    prefix = kv_len - num_queries
    if meta.tree_mask is None:
        keys = torch.arange(kv_len, device=device)
        return keys <= torch.arange(prefix + first, prefix + last, device=device).unsqueeze(1)
    seen = torch.ones(last - first, kv_len, dtype=torch.bool, device=device)
    covered = min(kv_len, meta.tree_mask.shape[1])  # the mask's columns are the row's last keys
    seen[:, kv_len - covered :] = meta.tree_mask[start + first : start + last, meta.tree_mask.shape[1] - covered :]
    return seen


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q k^T * scale) v with grouped heads; q: [n, Hq, D], keys and values: [L, Hkv, D] -> [n, Hq, D]."""
    num_kv_heads = keys.shape[1]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [n, Hkv, G, D]
    scores = torch.einsum("nhgd,lhd->hgnl", grouped, keys.float()) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgnl,lhd->nhgd", weights, values.float()).flatten(1, 2).to(q.dtype)
