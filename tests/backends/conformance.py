"""Helpers of the conformance suite: float64 references written from the definitions, tolerances, batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ssd_ascend.backends.base import AttentionBackend, AttentionSpec, Backend
from ssd_ascend.core.attention import AttentionMetadata

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal within the rounding of `dtype`, whatever the device."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Case:
    """Rows of (queries, keys in all) for one model shape, with random contents on the host."""

    spec: AttentionSpec
    rows: tuple[tuple[int, int], ...]
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    table: torch.Tensor
    num_blocks: int
    tree_mask: torch.Tensor | None = None

    @property
    def fresh(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each row's queries: what a forward stores."""
        return [
            (k[kv_len - n :], v[kv_len - n :])
            for (n, kv_len), k, v in zip(self.rows, self.keys, self.values, strict=True)
        ]


def spec_of(heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> AttentionSpec:
    """The attention of a one-layer model."""
    return AttentionSpec(1, heads, kv_heads, dim, block_size, dtype, 1 / math.sqrt(dim))


def make_case(spec: AttentionSpec, rows: tuple[tuple[int, int], ...], *, seed: int = 0) -> Case:
    """A ragged batch whose blocks lie scattered in a cache with a spare block."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(spec.dtype)

    needed = [-(-kv_len // spec.block_size) for _, kv_len in rows]
    num_blocks = sum(needed) + 1
    order = torch.randperm(num_blocks, generator=g).int()
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count], order = order[:count], order[count:]
    return Case(
        spec=spec,
        rows=rows,
        q=normal(sum(n for n, _ in rows), spec.num_heads, spec.head_dim),
        keys=[normal(kv_len, spec.num_kv_heads, spec.head_dim) for _, kv_len in rows],
        values=[normal(kv_len, spec.num_kv_heads, spec.head_dim) for _, kv_len in rows],
        table=table,
        num_blocks=num_blocks,
    )


def slots_of(case: Case, row: int, positions: range) -> list[int]:
    """Where the cache keeps these positions of a row."""
    size = case.spec.block_size
    return [int(case.table[row, p // size]) * size + p % size for p in positions]


def metadata(
    case: Case, device: torch.device, rows: tuple[tuple[int, int], ...], *, slots: list[int]
) -> AttentionMetadata:
    """The step's metadata for these (queries, keys) per row, on the device."""
    queries, lengths = [n for n, _ in rows], [kv_len for _, kv_len in rows]
    start = torch.tensor([0, *queries]).cumsum(0).int()
    return AttentionMetadata(
        query_lens_host=queries,
        kv_lens_host=lengths,
        query_start=start.to(device),
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=case.table.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        tree_mask=None if case.tree_mask is None else case.tree_mask.to(device),
    )


def filled_cache(case: Case, attention: AttentionBackend, device: torch.device) -> torch.Tensor:
    """A cache of large rubbish in which only the rows' earlier positions, before their queries, are right."""
    kv = torch.full(attention.kv_shape(case.num_blocks), 1e3, dtype=case.spec.dtype, device=device)
    flat = kv.view(2, -1, *kv.shape[3:])[..., : case.spec.head_dim]  # a device may keep wider ones
    for row, (n, kv_len) in enumerate(case.rows):
        slots = torch.tensor(slots_of(case, row, range(kv_len - n)), dtype=torch.int64, device=device)
        flat[0, slots] = case.keys[row][: kv_len - n].to(device)
        flat[1, slots] = case.values[row][: kv_len - n].to(device)
    return kv


def run_case(backend: Backend, case: Case) -> torch.Tensor:
    """One forward of the whole batch: store the new keys, attend. Returns [T, Hq * D] on the host."""
    device = backend.device(0)
    attention = backend.attention(case.spec, device)
    kv = filled_cache(case, attention, device)
    slots = [s for row, (n, kv_len) in enumerate(case.rows) for s in slots_of(case, row, range(kv_len - n, kv_len))]
    meta = metadata(case, device, case.rows, slots=slots)
    attention.plan(meta)
    k, v = (torch.cat(parts).to(device) for parts in zip(*case.fresh, strict=True))
    return attention.forward(case.q.to(device), k, v, kv, meta, 0).cpu()


def expected(case: Case) -> torch.Tensor:
    """The definition, in float64: [T, Hq * D]."""
    spec, out, start = case.spec, [], 0
    group = spec.num_heads // spec.num_kv_heads
    for (n, kv_len), keys, values in zip(case.rows, case.keys, case.values, strict=True):
        q = case.q[start : start + n].double()
        k, v = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
        scores = torch.einsum("nhd,lhd->hnl", q, k) * spec.scale
        seen = torch.ones(n, kv_len).tril(kv_len - n).bool()
        if case.tree_mask is not None:
            seen = torch.ones(n, kv_len).bool()
            covered = min(kv_len, case.tree_mask.shape[1])
            seen[:, kv_len - covered :] = case.tree_mask[start : start + n, case.tree_mask.shape[1] - covered :]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hnl,lhd->nhd", weights, v).flatten(1))
        start += n
    return torch.cat(out)


def with_tree(case: Case, *, seed: int = 0) -> Case:
    """The case with a random tree mask over each row's last keys: every query sees itself and some of the others.

    It reaches further back than the longest row of queries, and for a short row beyond its first key.
    """
    width = max(n for n, _ in case.rows) + 7
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(case.q.shape[0], width, generator=g) < 0.5
    start = 0
    for n, _ in case.rows:
        mask[start : start + n, width - n :] |= torch.eye(n).bool()
        start += n
    return replace(case, tree_mask=mask)
