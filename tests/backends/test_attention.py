"""Paged attention of every backend against its definition in float64: ragged batches, block edges, trees, padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ssd_ascend.backends.base import AttentionSpec, Backend
from tests.backends.conformance import (
    Case,
    close,
    expected,
    filled_cache,
    make_case,
    metadata,
    run_case,
    slots_of,
    spec_of,
    with_tree,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
MIXED = ((1, 1), (1, 100), (7, 7), (6, 64), (17, 65), (1, 63), (6, 200))
"""(queries, keys): first token, decode, prefill, verify rows at and around block edges, a later prefill chunk."""


def spec_for(backend: Backend, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> AttentionSpec:
    if dtype not in backend.capabilities.dtypes:
        pytest.skip(f"{backend.name} does not serve {dtype}")
    return spec_of(heads, kv_heads, dim, backend.capabilities.block_sizes[0], dtype)


@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 4, 64), (16, 1, 64), (6, 2, 96), (8, 2, 128), (2, 1, 256), (4, 2, 16), (5, 1, 8)],
)
def test_ragged_batch(backend: Backend, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    case = make_case(spec_for(backend, heads, kv_heads, dim, dtype), MIXED)
    close(run_case(backend, case), expected(case), dtype)


def test_every_block_size(backend: Backend) -> None:
    dtype = backend.capabilities.dtypes[0]
    for block_size in backend.capabilities.block_sizes:
        for kv_len in (block_size - 1, block_size, block_size + 1):
            case = make_case(spec_of(4, 2, 64, block_size, dtype), ((3, kv_len), (1, kv_len)))
            close(run_case(backend, case), expected(case), dtype)


@pytest.mark.parametrize("kv_len", [1, 2, 15, 16, 17, 127, 128, 129, 500, 1000])
def test_contexts(backend: Backend, kv_len: int) -> None:
    dtype = backend.capabilities.dtypes[0]
    case = make_case(spec_for(backend, 6, 2, 64, dtype), ((1, kv_len), (min(9, kv_len), kv_len)))
    close(run_case(backend, case), expected(case), dtype)


@dtypes
def test_tree_mask(backend: Backend, dtype: torch.dtype) -> None:
    if not backend.capabilities.tree_mask:
        pytest.skip(f"{backend.name} has no tree masks")
    case = with_tree(make_case(spec_for(backend, 6, 2, 64, dtype), ((6, 70), (1, 20), (17, 17), (9, 130))))
    close(run_case(backend, case), expected(case), dtype)


def test_causal_tree_mask_is_plain_attention(backend: Backend) -> None:
    if not backend.capabilities.tree_mask:
        pytest.skip(f"{backend.name} has no tree masks")
    case = make_case(spec_for(backend, 6, 2, 64, backend.capabilities.dtypes[0]), ((9, 80),))
    causal = replace(case, tree_mask=torch.ones(9, 9).tril().bool())
    close(run_case(backend, causal), run_case(backend, case), case.spec.dtype)


@dtypes
def test_padded_tokens_are_neither_stored_nor_attended(
    backend: Backend, device: torch.device, dtype: torch.dtype
) -> None:
    """Slot -1, within the rows and behind them: the cache keeps what it held."""
    case = make_case(spec_for(backend, 4, 2, 64, dtype), ((3, 20),))
    attention = backend.attention(case.spec, device)
    kv = filled_cache(case, attention, device)
    before = kv.clone()
    k, v = (torch.cat([part, torch.full_like(part, 7.0)]).to(device) for part in case.fresh[0])
    q = torch.cat([case.q, case.q]).to(device)
    slots = slots_of(case, 0, range(17, 20))
    meta = metadata(case, device, case.rows, slots=[*slots, -1, -1, -1])
    attention.plan(meta)
    got = attention.forward(q, k, v, kv, meta, 0)
    close(got[:3], expected(case), dtype)
    assert torch.isfinite(got).all()
    changed = (kv != before).flatten(3).any(-1).nonzero()
    touched = {int(block) * case.spec.block_size + int(offset) for _, block, offset in changed}
    assert touched == set(slots)


def test_inputs_may_be_views_of_one_projection(backend: Backend, device: torch.device) -> None:
    case = make_case(spec_for(backend, 4, 2, 64, backend.capabilities.dtypes[0]), ((5, 40),))
    attention = backend.attention(case.spec, device)
    kv = filled_cache(case, attention, device)
    k, v = case.fresh[0]
    packed = torch.cat([case.q, k, v], dim=1).to(device)
    meta = metadata(case, device, case.rows, slots=slots_of(case, 0, range(35, 40)))
    attention.plan(meta)
    got = attention.forward(packed[:, :4], packed[:, 4:6], packed[:, 6:], kv, meta, 0)
    close(got, expected(case), case.spec.dtype)


def step_by_step(backend: Backend, case: Case, sizes: tuple[int, ...]) -> torch.Tensor:
    """The one row of `case`, fed in pieces of these sizes: [T, Hq * D]."""
    device = backend.device(0)
    attention = backend.attention(case.spec, device)
    kv = torch.zeros(attention.kv_shape(case.num_blocks), dtype=case.spec.dtype, device=device)
    out, done = [], 0
    for size in sizes:
        piece = slice(done, done + size)
        done += size
        meta = metadata(case, device, ((size, done),), slots=slots_of(case, 0, range(piece.start, done)))
        attention.plan(meta)
        q, k, v = (t[piece].to(device) for t in (case.q, case.keys[0], case.values[0]))
        out.append(attention.forward(q, k, v, kv, meta, 0))
    return torch.cat(out).cpu()


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (5, 1, 8), (4, 4, 96), (16, 1, 128)])
def test_decode_verify_and_prefill_agree(
    backend: Backend, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """The same tokens as one prefill, as chunks, as verify rows and one by one: bitwise where that is promised."""
    length = 150
    case = make_case(spec_for(backend, heads, kv_heads, dim, dtype), ((length, length),))
    whole = step_by_step(backend, case, (length,))
    close(whole, expected(case), dtype)
    ones = (1,) * 30
    for sizes in ((64, 64, 22), (33, 17, 100), (100, *ones, 6, 6, 6, 2), (103, 17, 6, 7, 8, 9), (90, *ones, *ones)):
        pieces = step_by_step(backend, case, sizes)
        if backend.capabilities.row_invariant:
            assert torch.equal(pieces, whole), sizes
        else:
            close(pieces, whole, dtype)


def test_rows_do_not_see_neighbours(backend: Backend) -> None:
    if not backend.capabilities.row_invariant:
        pytest.skip(f"{backend.name} does not promise row invariance")
    spec = spec_for(backend, 6, 2, 64, backend.capabilities.dtypes[0])
    case = make_case(spec, MIXED)
    together, start = run_case(backend, case), 0
    for row, (n, kv_len) in enumerate(MIXED):
        alone = replace(
            case,
            rows=((n, kv_len),),
            q=case.q[start : start + n],
            keys=[case.keys[row]],
            values=[case.values[row]],
            table=case.table[row : row + 1],
        )
        assert torch.equal(run_case(backend, alone), together[start : start + n]), (n, kv_len)
        start += n
