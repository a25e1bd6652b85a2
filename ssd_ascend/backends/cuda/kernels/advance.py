"""The next round's numbers from a verdict on the device, in one launch; `runtime/advance.py` is the reference."""

from __future__ import annotations

import triton
import triton.language as tl

from ssd_ascend.backends.cuda.kernels.launch import launch, wait_for_previous
from ssd_ascend.core.advance import Advance

_POINTERS = (
    *("pairs", "rows", "start", "ids", "last", "features", "verify_ids"),
    *("feed_positions", "feed_slots", "feed_kv_lens", "feed_table"),
    *("step_positions", "step_slots", "step_kv_lens"),
    *("verify_positions", "verify_slots", "verify_kv_lens", "verify_table"),
)
_NUMBERS = ("feed_stride", "step_row", "step_token", "verify_stride")


def advance(to: Advance, *, overlap: bool) -> None:
    """A program for each sequence. Of its tensors only those of `steps` may lie in strides."""
    count, depth = to.rows.shape
    dense = (to.rows, to.ids, to.verify_ids, *to.feed[:4], *to.verify[:4])
    assert all(tensor.is_contiguous() for tensor in dense), "rows follow each other"
    launch(
        _advance,
        (count,),
        to.pairs, to.rows, to.start, to.ids, to.last, to.features, to.verify_ids,
        *to.feed[:4], to.feed.table.stride(0),
        *to.steps[:3], *to.steps.positions.stride(),
        *to.verify[:4], to.verify.table.stride(0),
        DRAFT_BLOCK=to.feed.block_size, TARGET_BLOCK=to.verify.block_size,
        WIDTH=to.ids.shape[1], STEPS=to.steps.positions.shape[1], DEPTH=depth,
        LANES=triton.next_power_of_2(depth + 1), OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _advance(
    pairs: tl.tensor,
    rows: tl.tensor,
    start: tl.tensor,
    ids: tl.tensor,
    last: tl.tensor,
    features: tl.tensor,
    verify_ids: tl.tensor,
    feed_positions: tl.tensor,
    feed_slots: tl.tensor,
    feed_kv_lens: tl.tensor,
    feed_table: tl.tensor,
    feed_stride: tl.tensor,
    step_positions: tl.tensor,
    step_slots: tl.tensor,
    step_kv_lens: tl.tensor,
    step_row: tl.tensor,
    step_token: tl.tensor,
    verify_positions: tl.tensor,
    verify_slots: tl.tensor,
    verify_kv_lens: tl.tensor,
    verify_table: tl.tensor,
    verify_stride: tl.tensor,
    DRAFT_BLOCK: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    judged = rows + row * DEPTH
    compared = lane + 1 < DEPTH
    own = tl.load(pairs + 2 * tl.load(judged + lane, mask=compared, other=0))
    fed = tl.load(pairs + 2 * tl.load(judged + lane + 1, mask=compared, other=0) + 1)
    accepted = tl.min(tl.where(compared & (own == fed), DEPTH, lane), axis=0)
    at = 2 * tl.load(judged + accepted)
    recovery = tl.maximum(tl.load(pairs + at), 0)
    begin = tl.load(start + row)
    live = begin >= 0
    begin = tl.maximum(begin, 0)
    end = begin + accepted + 1
    own_table, target_table = feed_table + row * feed_stride, verify_table + row * verify_stride

    fills = lane < WIDTH
    if features is not None:
        known = tl.minimum(lane, accepted)
        token = tl.load(pairs + 2 * tl.load(judged + known, mask=fills, other=0))
        tl.store(ids + row * WIDTH + lane, tl.maximum(token, 0), mask=fills)
        tl.store(features + row * WIDTH + lane, _slots(target_table, begin + known, fills, TARGET_BLOCK), mask=fills)
        tl.store(last + row, row * WIDTH + accepted)
        fed_from, step_from = begin, end
    else:
        token = tl.where(lane == 0, tl.maximum(tl.load(pairs + at + 1), 0), recovery)
        tl.store(ids + row * WIDTH + lane, token, mask=fills)
        tl.store(last + row, row * WIDTH + WIDTH - 1)
        fed_from, step_from = end - 1, end + 1
    _place(feed_positions, feed_slots, row * WIDTH + lane, fed_from + lane, own_table, fills, live, DRAFT_BLOCK)
    tl.store(feed_kv_lens + row, tl.where(live, fed_from + WIDTH, 0).to(tl.int32))

    stepped = lane < STEPS
    out = row * step_row + lane * step_token
    _place(step_positions, step_slots, out, step_from + lane, own_table, stepped, live, DRAFT_BLOCK)
    tl.store(step_kv_lens + out, tl.where(live, step_from + lane + 1, 0).to(tl.int32), mask=stepped)

    verified = lane < DEPTH
    tl.store(verify_ids + row * DEPTH, recovery)
    _place(verify_positions, verify_slots, row * DEPTH + lane, end + lane, target_table, verified, live, TARGET_BLOCK)
    tl.store(verify_kv_lens + row, tl.where(live, end + DEPTH, 0).to(tl.int32))


@triton.jit
def _place(
    positions: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    place: tl.tensor,
    table: tl.tensor,
    inside: tl.tensor,
    live: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Positions and slots of one row's tokens; without a sequence 0 and -1."""
    place = tl.where(live, place, 0)
    tl.store(positions + out, place, mask=inside)
    tl.store(slots + out, tl.where(live, _slots(table, place, inside, BLOCK), -1), mask=inside)


@triton.jit
def _slots(table: tl.tensor, place: tl.tensor, inside: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    return tl.load(table + place // BLOCK, mask=inside, other=0).to(tl.int64) * BLOCK + place % BLOCK
