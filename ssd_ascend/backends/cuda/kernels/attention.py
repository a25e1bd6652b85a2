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

_INDICES = ("query_start", "kv_lens", "block_table", "work_row", "work_item", "work_count", "token_row")
"""Slices of packed buffers, whose alignment changes from step to step: compiling for each would stall serving."""
_UNROLL = tl.constexpr(16)
"""Tiles that `merge` has in flight."""


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=_INDICES)
def plan_work(
    query_start: tl.tensor,
    kv_lens: tl.tensor,
    work_row: tl.tensor,
    work_item: tl.tensor,
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

    work_row[w], work_item[w] = row, query block * tiles + tile; token_row[t] = row of token t, -1 for padding or for
    tokens of rows longer than LONGEST. The last program writes work_count and the padding.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    real = lane < num_rows
    begin = tl.load(query_start + lane, mask=real, other=0)
    queries = tl.load(query_start + lane + 1, mask=real, other=0) - begin
    tiles = tl.cdiv(tl.load(kv_lens + lane, mask=real, other=0), TILE)
    work = tl.where((queries > 0) & (queries <= LONGEST), tl.cdiv(queries, QUERIES) * tiles, 0)
    offset = tl.arange(0, CHUNK)
    base = tl.sum(tl.where(lane < row, work, 0), axis=0)
    if row == num_rows:
        tl.store(work_count, base)
        end = tl.load(query_start + num_rows)
        for first in range(end, num_tokens, CHUNK):
            tl.store(token_row + first + offset, -1, mask=first + offset < num_tokens)
    else:
        mine = tl.sum(tl.where(lane == row, work, 0), axis=0)
        for first in range(0, mine, CHUNK):
            inside = first + offset < mine
            tl.store(work_row + base + first + offset, row, mask=inside)
            tl.store(work_item + base + first + offset, first + offset, mask=inside)
        start = tl.load(query_start + row)
        count = tl.load(query_start + row + 1) - start
        named = tl.where(count <= LONGEST, row, -1)
        for first in range(0, count, CHUNK):
            tl.store(token_row + start + first + offset, named, mask=first + offset < count)


@triton.jit
def _load_tile(
    cache: tl.tensor,
    table: tl.tensor,
    key: tl.tensor,
    kv_len: tl.tensor,
    d: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Rows `key` of one head's paged keys or values, zeros beyond kv_len."""
    real = key < kv_len
    block = tl.load(table + key // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + key % BLOCK_SIZE
    return tl.load(
        cache + slot[:, None] * slot_stride + d[None, :], mask=real[:, None] & (d < WIDTH)[None, :], other=0.0
    )


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
    work_row: tl.tensor,
    work_item: tl.tensor,
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
    """Write (m, l, a) of every (query block, key tile) of the plan; programs take them in turn."""
    wait_for_previous(OVERLAP)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, TILE)
    for item in range(tl.program_id(0), tl.load(work_count) * KV_HEADS, tl.num_programs(0)):
        head = item % KV_HEADS
        row = tl.load(work_row + item // KV_HEADS)
        inner = tl.load(work_item + item // KV_HEADS)
        kv_len = tl.load(kv_lens + row)
        start = tl.load(query_start + row)
        queries = tl.load(query_start + row + 1) - start
        tiles = tl.cdiv(kv_len, TILE)
        tile = inner % tiles
        query = inner // tiles * (BLOCK_M // GROUP) + m // GROUP
        valid = (query < queries) & (m < BLOCK_M // GROUP * GROUP)
        token = start + query
        q_head = head * GROUP + m % GROUP
        place = token.to(tl.int64) * q_stride + q_head * q_head_stride
        block = tl.load(q + place[:, None] + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
        key = tile * TILE + n
        table = block_table + row.to(tl.int64) * table_stride
        cache = kv + head * WIDTH
        keys = _load_tile(cache, table, key, kv_len, d, KV_HEADS * WIDTH, BLOCK_SIZE, WIDTH)
        values = _load_tile(cache + half.to(tl.int64), table, key, kv_len, d, KV_HEADS * WIDTH, BLOCK_SIZE, WIDTH)
        last = kv_len - queries + query
        score = _scores(block, keys, key, last, token, kv_len, scale, tree_mask, tree_width, valid)
        top, total, weighted = _weigh(score, values, TILE)
        part = (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head) * max_tiles + tile
        tl.store(part_sum + part[:, None] * WIDTH + d[None, :], weighted, mask=valid[:, None] & (d < WIDTH)[None, :])
        tl.store(part_top + part * 2, top, mask=valid)
        tl.store(part_top + part * 2 + 1, total, mask=valid)


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
            keys = _load_tile(cache, table, first + n, kv_len, d, KV_HEADS * WIDTH, BLOCK_SIZE, WIDTH)
            score = _scores(block, keys, first + n, last, token, kv_len, scale, None, 0, valid)
            top = tl.maximum(top, tl.max(score, axis=1))
        top = tl.where(top == float("-inf"), 0.0, top)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(0, end, TILE):
            keys = _load_tile(cache, table, first + n, kv_len, d, KV_HEADS * WIDTH, BLOCK_SIZE, WIDTH)
            values = _load_tile(
                cache + half.to(tl.int64), table, first + n, kv_len, d, KV_HEADS * WIDTH, BLOCK_SIZE, WIDTH
            )
            score = _scores(block, keys, first + n, last, token, kv_len, scale, None, 0, valid)
            tile_top, amount, piece = _weigh(score, values, TILE)
            weight = tl.exp2(tile_top - top)
            acc = tl.fma(piece, tl.broadcast_to(weight[:, None], (BLOCK_M, BLOCK_D)), acc)
            total = tl.fma(amount, weight, total)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head)[:, None] * WIDTH + d[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=valid[:, None] & (d < WIDTH)[None, :])
