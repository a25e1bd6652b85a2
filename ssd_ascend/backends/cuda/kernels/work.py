"""What the attention of a step consists of, listed on the device from the lengths that are there.

`attention.py` of this backend launches `plan_work` once a step; `kernels/attention.py` works the list off.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssd_ascend.backends.cuda.kernels.launch import wait_for_previous

INDICES = ("query_start", "kv_lens", "block_table", "work", "work_count", "token_row")
"""Slices of packed buffers, whose alignment changes from step to step: compiling for each would stall serving."""
WORK = 8
"""Numbers that describe a piece of work, side by side so that they arrive together."""
_WORK = tl.constexpr(WORK)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=INDICES)
def plan_work(
    query_start: tl.tensor,
    kv_lens: tl.tensor,
    work: tl.tensor,
    token_row: tl.tensor,
    work_count: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    LONGEST: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Once per step, a program per row and one more: list what `split` is to do for the rows of up to LONGEST queries.

    A row of up to TOGETHER tiles is a piece of work for each block of queries, a longer one for each tile of those.
    work[w] = row, its first token, queries and keys, then first tile, first query and number of tiles of this piece;
    token_row[t] = row of token t where `merge` has something to add up, -1 for padding, -2 for all others. The last
    program writes work_count and the padding.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    real = lane < num_rows
    begin = tl.load(query_start + lane, mask=real, other=0)
    queries = tl.load(query_start + lane + 1, mask=real, other=0) - begin
    tiles = tl.cdiv(tl.load(kv_lens + lane, mask=real, other=0), TILE)
    cuts = tl.where(tiles <= TOGETHER, tl.minimum(tiles, 1), tiles)
    pieces = tl.where((queries > 0) & (queries <= LONGEST), tl.cdiv(queries, QUERIES) * cuts, 0)
    offset = tl.arange(0, CHUNK)
    base = tl.sum(tl.where(lane < row, pieces, 0), axis=0)
    if row == num_rows:
        tl.store(work_count, base)
        end = tl.load(query_start + num_rows)
        for first in range(end, num_tokens, CHUNK):
            tl.store(token_row + first + offset, -1, mask=first + offset < num_tokens)
    else:
        mine = tl.sum(tl.where(lane == row, pieces, 0), axis=0)
        start = tl.load(query_start + row)
        count = tl.load(query_start + row + 1) - start
        kv_len = tl.load(kv_lens + row)
        tiles_here = tl.maximum(tl.cdiv(kv_len, TILE), 1)
        together = tiles_here <= TOGETHER
        cuts_here = tl.where(together, 1, tiles_here)
        for first in range(0, mine, CHUNK):
            piece = first + offset
            inside = piece < mine
            target = work + (base + piece) * _WORK
            tl.store(target, row, mask=inside)
            tl.store(target + 1, start, mask=inside)
            tl.store(target + 2, count, mask=inside)
            tl.store(target + 3, kv_len, mask=inside)
            tl.store(target + 4, piece % cuts_here, mask=inside)
            tl.store(target + 5, piece // cuts_here * QUERIES, mask=inside)
            tl.store(target + 6, tl.where(together, tiles_here, 1), mask=inside)
        named = tl.where((count > LONGEST) | together, -2, row)
        for first in range(0, count, CHUNK):
            tl.store(token_row + start + first + offset, named, mask=first + offset < count)


@triton.jit
def piece(
    work: tl.tensor, index: tl.tensor, real: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Row, first token, queries, keys, first tile, first query and tiles of a piece of work; zeros where none is."""
    at = work + index * _WORK
    row = tl.load(at, mask=real, other=0)
    start = tl.load(at + 1, mask=real, other=0)
    queries = tl.load(at + 2, mask=real, other=0)
    kv_len = tl.load(at + 3, mask=real, other=0)
    tile = tl.load(at + 4, mask=real, other=0)
    query = tl.load(at + 5, mask=real, other=0)
    count = tl.load(at + 6, mask=real, other=0)
    return row, start, queries, kv_len, tile, query, count
