"""Paged attention whose result for a query depends on nothing but the query and its own keys: bit for bit.

Keys are cut into tiles of TILE at absolute positions 0, TILE, 2 * TILE, ... Tile s of a query yields its own maximum
m_s, sum l_s and weighted values a_s; the answer is  sum_s a_s w_s / sum_s l_s w_s  with  w_s = exp2(m_s - max_s m_s),
added in ascending s as a chain of fused multiply-adds. Sums within a tile run on the tensor cores, whose order is the
same whatever the shape of the block of queries. So decoding a token, verifying it among drafts, and prefilling it in
any chunk give the same bits; a tile that a query does not see adds exact zeros.

`split` + `merge` serve rows of few queries (one program per tile: short rows need the parallelism), `whole` long rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssd_ascend.backends.cuda.kernels.launch import wait_for_previous

_INDICES = ("query_start", "kv_lens", "block_table", "work", "work_count", "token_row")
"""Slices of packed buffers, whose alignment changes from step to step: compiling for each would stall serving."""
_UNROLL = tl.constexpr(16)
"""Tiles that `merge` has in flight."""
WORK = 8
"""Numbers that describe a piece of work, side by side so that they arrive together."""
_WORK = tl.constexpr(WORK)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=_INDICES)
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
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Once per step, a program per row and one more: list the (query block, key tile) pairs of all short rows.

    work[w] = row, its first token, queries and keys, then tile and first query of this piece; token_row[t] = row of
    token t, -1 for padding or for tokens of rows longer than LONGEST. The last program writes work_count and the
    padding.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    real = lane < num_rows
    begin = tl.load(query_start + lane, mask=real, other=0)
    queries = tl.load(query_start + lane + 1, mask=real, other=0) - begin
    tiles = tl.cdiv(tl.load(kv_lens + lane, mask=real, other=0), TILE)
    pieces = tl.where((queries > 0) & (queries <= LONGEST), tl.cdiv(queries, QUERIES) * tiles, 0)
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
        for first in range(0, mine, CHUNK):
            piece = first + offset
            inside = piece < mine
            target = work + (base + piece) * _WORK
            tl.store(target, row, mask=inside)
            tl.store(target + 1, start, mask=inside)
            tl.store(target + 2, count, mask=inside)
            tl.store(target + 3, kv_len, mask=inside)
            tl.store(target + 4, piece % tiles_here, mask=inside)
            tl.store(target + 5, piece // tiles_here * QUERIES, mask=inside)
        named = tl.where(count <= LONGEST, row, -1)
        for first in range(0, count, CHUNK):
            tl.store(token_row + start + first + offset, named, mask=first + offset < count)


@triton.jit
def _slots(table: tl.tensor, key: tl.tensor, kv_len: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Where the cache keeps the positions `key` of a row, by its block table; 0 for those beyond kv_len."""
    block = tl.load(table + key // BLOCK_SIZE, mask=key < kv_len, other=0).to(tl.int64)
    return block * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def _load_tile(
    cache: tl.tensor,
    slot: tl.tensor,
    real: tl.tensor,
    d: tl.tensor,
    slot_stride: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """One head's keys or values at `slot`, zeros where not `real`."""
    return tl.load(
        cache + slot[:, None] * slot_stride + d[None, :], mask=real[:, None] & (d < WIDTH)[None, :], other=0.0
    )


@triton.jit
def _piece(
    work: tl.tensor, index: tl.tensor, real: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Row, first token, queries, keys, tile and first query of a piece of work; zeros where there is none."""
    at = work + index * _WORK
    row = tl.load(at, mask=real, other=0)
    start = tl.load(at + 1, mask=real, other=0)
    queries = tl.load(at + 2, mask=real, other=0)
    kv_len = tl.load(at + 3, mask=real, other=0)
    tile = tl.load(at + 4, mask=real, other=0)
    query = tl.load(at + 5, mask=real, other=0)
    return row, start, queries, kv_len, tile, query


@triton.jit
def _scores(
    q: tl.tensor,
    keys: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    token: tl.tensor,
    kv_len: tl.tensor,
    scale: tl.tensor,
    tree_mask: tl.tensor,
    tree_width: tl.tensor,
    valid: tl.tensor,
) -> tl.tensor:
    """Scaled scores in units of log2, -inf where query (row) may not see key (column)."""
    score = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if tree_mask is None:
        seen = key[None, :] <= last[:, None]
    else:
        column = key - (kv_len - tree_width)
        named = column >= 0
        mask = tl.load(
            tree_mask + token.to(tl.int64)[:, None] * tree_width + column[None, :],
            mask=valid[:, None] & (named & (key < kv_len))[None, :],
            other=0,
        )
        seen = (key < kv_len)[None, :] & ((mask != 0) | (column < 0)[None, :])
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _weigh(score: tl.tensor, values: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(m, l, a) of one tile; a query that sees nothing of it gets (-inf, 0, 0)."""
    top = tl.max(score, axis=1)
    weight = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None]).to(values.dtype)
    ones = tl.full((TILE, 16), 1.0, values.dtype)
    # all 16 columns are equal; their maximum is a column
    total = tl.max(tl.dot(weight, ones, input_precision="ieee"), axis=1)
    return top, total, tl.dot(weight, values, input_precision="ieee")


@triton.jit(do_not_specialize=["max_tiles", "tree_width", "table_stride"], do_not_specialize_on_alignment=_INDICES)
def split(
    q: tl.tensor,
    kv: tl.tensor,
    block_table: tl.tensor,
    query_start: tl.tensor,
    kv_lens: tl.tensor,
    tree_mask: tl.tensor,
    work: tl.tensor,
    work_count: tl.tensor,
    part_sum: tl.tensor,
    part_top: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    half: tl.tensor,
    tree_width: tl.tensor,
    max_tiles: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Write (m, l, a) of every (query block, key tile) of the plan; programs take them in turn.

    What a piece is, and where its keys lie, is read while the piece before is computed: those reads depend on each
    other, and with few keys a row they, not the keys, took the time.
    """
    wait_for_previous(OVERLAP)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, TILE)
    total = tl.load(work_count) * KV_HEADS
    first = tl.program_id(0)
    row, start, queries, kv_len, tile, query = _piece(work, first // KV_HEADS, first < total)
    slot = _slots(block_table + row.to(tl.int64) * table_stride, tile * TILE + n, kv_len, BLOCK_SIZE)
    for item in range(first, total, tl.num_programs(0)):
        head = item % KV_HEADS
        key = tile * TILE + n
        cache = kv + head * WIDTH
        keys = _load_tile(cache, slot, key < kv_len, d, KV_HEADS * WIDTH, WIDTH)
        values = _load_tile(cache + half.to(tl.int64), slot, key < kv_len, d, KV_HEADS * WIDTH, WIDTH)
        own_query = query + m // GROUP
        valid = (own_query < queries) & (m < BLOCK_M // GROUP * GROUP)
        token = start + own_query
        q_head = head * GROUP + m % GROUP
        place = token.to(tl.int64) * q_stride + q_head * q_head_stride
        block = tl.load(q + place[:, None] + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
        last = kv_len - queries + own_query
        part = (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head) * max_tiles + tile
        seen_len = kv_len
        after = item + tl.num_programs(0)
        row, start, queries, kv_len, tile, query = _piece(work, after // KV_HEADS, after < total)
        slot = _slots(block_table + row.to(tl.int64) * table_stride, tile * TILE + n, kv_len, BLOCK_SIZE)
        score = _scores(block, keys, key, last, token, seen_len, scale, tree_mask, tree_width, valid)
        top, amount, weighted = _weigh(score, values, TILE)
        tl.store(part_sum + part[:, None] * WIDTH + d[None, :], weighted, mask=valid[:, None] & (d < WIDTH)[None, :])
        tl.store(part_top + part * 2, top, mask=valid)
        tl.store(part_top + part * 2 + 1, amount, mask=valid)


@triton.jit(do_not_specialize=["max_tiles"], do_not_specialize_on_alignment=_INDICES)
def merge(
    part_sum: tl.tensor,
    part_top: tl.tensor,
    out: tl.tensor,
    token_row: tl.tensor,
    query_start: tl.tensor,
    kv_lens: tl.tensor,
    max_tiles: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    LANES: tl.constexpr,
    KEEP_LONG: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [T, HEADS, WIDTH] of tokens of short rows, zeros for padding; KEEP_LONG: leave the tokens of long rows."""
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    target = out + (token * HEADS + head) * WIDTH + d
    row = tl.load(token_row + token)
    if row >= 0:
        seen = tl.load(kv_lens + row)
        if CAUSAL:
            seen += token.to(tl.int32) + 1 - tl.load(query_start + row + 1)
        tiles = tl.cdiv(seen, TILE)
        part = (token * HEADS + head) * max_tiles
        lane = tl.arange(0, LANES)
        top = tl.full((), float("-inf"), tl.float32)
        for first in range(0, tiles, LANES):
            tops = tl.load(part_top + (part + first + lane) * 2, mask=first + lane < tiles, other=float("-inf"))
            top = tl.maximum(top, tl.max(tops, axis=0))
        top = tl.where(top == float("-inf"), 0.0, top)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        total = tl.zeros((), tl.float32)
        for first in range(0, tiles, _UNROLL):
            for step in tl.static_range(_UNROLL):
                real = first + step < tiles
                at = part + first + step
                weight = tl.exp2(tl.load(part_top + at * 2, mask=real, other=float("-inf")) - top)
                amount = tl.load(part_top + at * 2 + 1, mask=real, other=0.0)
                piece = tl.load(part_sum + at * WIDTH + d, mask=real & (d < WIDTH), other=0.0)
                acc = tl.fma(piece, tl.full((BLOCK_D,), 1.0, tl.float32) * weight, acc)
                total = tl.fma(amount, weight, total)
        result = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(target, result.to(out.dtype.element_ty), mask=d < WIDTH)
    else:
        if not KEEP_LONG:
            tl.store(target, tl.zeros((BLOCK_D,), out.dtype.element_ty), mask=d < WIDTH)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_INDICES)
def whole(
    q: tl.tensor,
    kv: tl.tensor,
    block_table: tl.tensor,
    query_start: tl.tensor,
    kv_lens: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    half: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LONGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Rows of more than LONGEST queries: a program per (query block, head, row) goes over all its keys, twice.

    The first pass finds each query's maximum, so that the second can add the tiles up exactly as `merge` does.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(2)
    head = tl.program_id(1)
    start = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - start
    first_query = tl.program_id(0) * (BLOCK_M // GROUP)
    if (queries > LONGEST) & (first_query < queries):
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        n = tl.arange(0, TILE)
        kv_len = tl.load(kv_lens + row)
        query = first_query + m // GROUP
        valid = (query < queries) & (m < BLOCK_M // GROUP * GROUP)
        token = start + query
        q_head = head * GROUP + m % GROUP
        place = token.to(tl.int64) * q_stride + q_head * q_head_stride
        block = tl.load(q + place[:, None] + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
        table = block_table + row.to(tl.int64) * table_stride
        cache = kv + head * WIDTH
        last = kv_len - queries + query
        end = min(kv_len, kv_len - queries + first_query + BLOCK_M // GROUP)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for first in range(0, end, TILE):
            slot = _slots(table, first + n, kv_len, BLOCK_SIZE)
            keys = _load_tile(cache, slot, first + n < kv_len, d, KV_HEADS * WIDTH, WIDTH)
            score = _scores(block, keys, first + n, last, token, kv_len, scale, None, 0, valid)
            top = tl.maximum(top, tl.max(score, axis=1))
        top = tl.where(top == float("-inf"), 0.0, top)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(0, end, TILE):
            slot = _slots(table, first + n, kv_len, BLOCK_SIZE)
            keys = _load_tile(cache, slot, first + n < kv_len, d, KV_HEADS * WIDTH, WIDTH)
            values = _load_tile(cache + half.to(tl.int64), slot, first + n < kv_len, d, KV_HEADS * WIDTH, WIDTH)
            score = _scores(block, keys, first + n, last, token, kv_len, scale, None, 0, valid)
            tile_top, amount, piece = _weigh(score, values, TILE)
            weight = tl.exp2(tile_top - top)
            acc = tl.fma(piece, tl.broadcast_to(weight[:, None], (BLOCK_M, BLOCK_D)), acc)
            total = tl.fma(amount, weight, total)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head)[:, None] * WIDTH + d[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=valid[:, None] & (d < WIDTH)[None, :])
