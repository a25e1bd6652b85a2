"""Paged attention whose result for a query depends on nothing but the query and its own keys: bit for bit.

Keys are cut into tiles of TILE at absolute positions 0, TILE, 2 * TILE, ... Tile s of a query yields m_s, its largest
score rounded up to a whole number, the sum l_s and the weighted values a_s of its weights 2^(score - m_s). The answer
is  sum_s a_s w_s / sum_s l_s w_s  with  w_s = 2^(m_s - max_s m_s), added in ascending s. As every w_s is a power of
two, scaling by it rounds nothing: a program that walks the tiles and rescales what it has whenever the maximum grows
gets the same bits as one that adds up tiles which others computed. Sums within a tile run on the tensor cores, whose
order is the same whatever the shape of the block of queries. So decoding a token, verifying it among drafts, and
prefilling it in any chunk give the same bits; a tile that a query does not see adds exact zeros.

`split` serves rows of few queries: a program for all tiles of a row where there are rows enough to fill the device, or
one for each tile, added up by `merge`. `whole` serves long rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssd_ascend.backends.cuda.kernels.launch import fetch_ahead, wait_for_previous
from ssd_ascend.backends.cuda.kernels.work import INDICES, piece

LINE = 64
"""Numbers of 16 bits in a line of the second-level cache."""
_LINE = tl.constexpr(LINE)
_UNROLL = tl.constexpr(16)
"""Tiles that `merge` has in flight."""


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
def _power(exponent: tl.tensor) -> tl.tensor:
    """2^exponent of whole numbers up to 0, exactly; 0 below 2^-126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rescale(top: tl.tensor, new: tl.tensor) -> tl.tensor:
    """What takes numbers relative to 2^top to numbers relative to 2^new; nothing was seen while top is -inf."""
    return _power(tl.where(top == float("-inf"), -127.0, top - new))


@triton.jit
def _weigh(score: tl.tensor, values: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(m, l, a) of one tile; a query that sees nothing of it gets (-inf, 0, 0)."""
    top = tl.ceil(tl.max(score, axis=1))
    weight = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None]).to(values.dtype)
    ones = tl.full((TILE, 16), 1.0, values.dtype)
    # all 16 columns are equal; their maximum is a column
    total = tl.max(tl.dot(weight, ones, input_precision="ieee"), axis=1)
    return top, total, tl.dot(weight, values, input_precision="ieee")


@triton.jit
def _added(
    acc: tl.tensor, total: tl.tensor, top: tl.tensor, more: tl.tensor, more_total: tl.tensor, more_top: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(a, l, m) of the tiles so far and of one more."""
    new = tl.maximum(top, more_top)
    kept, added = _rescale(top, new), _rescale(more_top, new)
    acc = tl.fma(more, tl.broadcast_to(added[:, None], more.shape), acc * kept[:, None])
    return acc, tl.fma(more_total, added, total * kept), new


@triton.jit(do_not_specialize=["max_tiles", "tree_width", "table_stride"], do_not_specialize_on_alignment=INDICES)
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
    out: tl.tensor,
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
    TOGETHER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Do the pieces of work of the plan in turn: (m, l, a) of tiles, and, where there are pieces of several tiles
    (TOGETHER), answers of whole rows.

    What a piece is, and where the keys of a single tile lie, is read while the piece before is computed, and for the
    first piece while the kernel before is still at work, which must be one that waits, then releases: those reads
    depend on each other, and with few keys a row they, not the keys, took the time.
    """
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, TILE)
    inside = (d < WIDTH)[None, :]
    total = tl.load(work_count) * KV_HEADS
    first = tl.program_id(0)
    row, start, queries, kv_len, tile, query, count = piece(work, first // KV_HEADS, first < total)
    if not TOGETHER:
        slot = _slots(block_table + row.to(tl.int64) * table_stride, tile * TILE + n, kv_len, BLOCK_SIZE)
        line = tl.minimum(tl.arange(0, LINES) * _LINE, WIDTH - 1)[None, :]
        line += slot[:, None] * (KV_HEADS * WIDTH) + first % KV_HEADS * WIDTH
        fetch_ahead(kv + line)
        fetch_ahead(kv + half.to(tl.int64) + line)
    wait_for_previous(OVERLAP)
    for item in range(first, total, tl.num_programs(0)):
        head = item % KV_HEADS
        own_query = query + m // GROUP
        valid = (own_query < queries) & (m < BLOCK_M // GROUP * GROUP)
        token = start + own_query
        q_head = head * GROUP + m % GROUP
        place = token.to(tl.int64) * q_stride + q_head * q_head_stride
        block = tl.load(q + place[:, None] + d[None, :], mask=valid[:, None] & inside, other=0.0)
        last = kv_len - queries + own_query
        part = token.to(tl.int64) * (KV_HEADS * GROUP) + q_head
        table = block_table + row.to(tl.int64) * table_stride
        cache = kv + head * WIDTH
        seen_len, first_tile, tiles = kv_len, tile, count
        after = item + tl.num_programs(0)
        row, start, queries, kv_len, tile, query, count = piece(work, after // KV_HEADS, after < total)
        mask = valid[:, None] & inside
        if TOGETHER:
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            amount = tl.zeros((BLOCK_M,), tl.float32)
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            for at in range(first_tile, first_tile + tiles):
                key = at * TILE + n
                place_of = _slots(table, key, seen_len, BLOCK_SIZE)
                keys = _load_tile(cache, place_of, key < seen_len, d, KV_HEADS * WIDTH, WIDTH)
                values = _load_tile(cache + half.to(tl.int64), place_of, key < seen_len, d, KV_HEADS * WIDTH, WIDTH)
                score = _scores(block, keys, key, last, token, seen_len, scale, tree_mask, tree_width, valid)
                one_top, one_amount, one = _weigh(score, values, TILE)
                acc, amount, top = _added(acc, amount, top, one, one_amount, one_top)
        else:
            key = first_tile * TILE + n
            keys = _load_tile(cache, slot, key < seen_len, d, KV_HEADS * WIDTH, WIDTH)
            values = _load_tile(cache + half.to(tl.int64), slot, key < seen_len, d, KV_HEADS * WIDTH, WIDTH)
            slot = _slots(block_table + row.to(tl.int64) * table_stride, tile * TILE + n, kv_len, BLOCK_SIZE)
            score = _scores(block, keys, key, last, token, seen_len, scale, tree_mask, tree_width, valid)
            top, amount, acc = _weigh(score, values, TILE)
        if TOGETHER and first_tile == 0 and tiles * TILE >= seen_len:
            result = acc / tl.where(amount == 0.0, 1.0, amount)[:, None]
            tl.store(out + part[:, None] * WIDTH + d[None, :], result.to(out.dtype.element_ty), mask=mask)
        else:
            part = part * max_tiles + first_tile
            tl.store(part_sum + part[:, None] * WIDTH + d[None, :], acc, mask=mask)
            tl.store(part_top + part * 2, top, mask=valid)
            tl.store(part_top + part * 2 + 1, amount, mask=valid)


@triton.jit(do_not_specialize=["max_tiles"], do_not_specialize_on_alignment=INDICES)
def merge(
    part_sum: tl.tensor,
    part_top: tl.tensor,
    out: tl.tensor,
    token_row: tl.tensor,
    query_start: tl.tensor,
    kv_lens: tl.tensor,
    max_tiles: tl.tensor,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [T, HEADS, WIDTH] of tokens whose tiles were computed one by one, zeros for padding; AT_ONCE heads each.

    Comes behind `split`, which did not start before the plan was there: that may be read at once."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_row + token)
    seen = tl.load(kv_lens + row, mask=row >= 0, other=0)
    if CAUSAL:
        seen += token.to(tl.int32) + 1 - tl.load(query_start + row + 1, mask=row >= 0, other=0)
    tiles = tl.where(row >= 0, tl.cdiv(seen, TILE), 0)
    wait_for_previous(OVERLAP)
    if row >= -1:
        d = tl.arange(0, BLOCK_D)
        for head in range(tl.program_id(1) * AT_ONCE, tl.program_id(1) * AT_ONCE + AT_ONCE):
            result = _added_up(part_sum, part_top, (token * HEADS + head) * max_tiles, tiles, WIDTH, BLOCK_D, LANES)
            target = out + (token * HEADS + head) * WIDTH + d
            tl.store(target, result.to(out.dtype.element_ty), mask=(d < WIDTH) & (head < HEADS))


@triton.jit
def _added_up(
    part_sum: tl.tensor,
    part_top: tl.tensor,
    part: tl.tensor,
    tiles: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """The answer of one head from `tiles` parts, the first of which is `part`; zeros for none."""
    lane = tl.arange(0, LANES)
    d = tl.arange(0, BLOCK_D)
    top = tl.full((), float("-inf"), tl.float32)
    for first in range(0, tiles, LANES):
        tops = tl.load(part_top + (part + first + lane) * 2, mask=first + lane < tiles, other=float("-inf"))
        top = tl.maximum(top, tl.max(tops, axis=0))
    acc = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((), tl.float32)
    for first in range(0, tiles, _UNROLL):
        for step in tl.static_range(_UNROLL):
            real = first + step < tiles
            at = part + first + step
            weight = _rescale(tl.load(part_top + at * 2, mask=real, other=float("-inf")), top)
            amount = tl.load(part_top + at * 2 + 1, mask=real, other=0.0)
            piece = tl.load(part_sum + at * WIDTH + d, mask=real & (d < WIDTH), other=0.0)
            acc = tl.fma(piece, tl.full((BLOCK_D,), 1.0, tl.float32) * weight, acc)
            total = tl.fma(amount, weight, total)
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=INDICES)
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
    """Rows of more than LONGEST queries: a program per (query block, head, row) goes over all its keys."""
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
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for first in range(0, end, TILE):
            slot = _slots(table, first + n, kv_len, BLOCK_SIZE)
            keys = _load_tile(cache, slot, first + n < kv_len, d, KV_HEADS * WIDTH, WIDTH)
            values = _load_tile(cache + half.to(tl.int64), slot, first + n < kv_len, d, KV_HEADS * WIDTH, WIDTH)
            score = _scores(block, keys, first + n, last, token, kv_len, scale, None, 0, valid)
            tile_top, amount, piece = _weigh(score, values, TILE)
            acc, total, top = _added(acc, total, top, piece, amount, tile_top)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head)[:, None] * WIDTH + d[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=valid[:, None] & (d < WIDTH)[None, :])
