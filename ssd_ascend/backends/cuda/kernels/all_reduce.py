"""The sum over ranks in one launch: every rank writes its numbers into the others' memory and adds what arrives there.

Each 8 bytes written carry 4 bytes of payload and the number of the turn, so that arrival needs no fence and no second
message. Two turns alternate between two places: who writes turn n + 2 has read turn n + 1 of everybody, who therefore
have read turn n. Ranks are added in their order, in float32, so all get the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd_ascend.backends.cuda.kernels.launch import launch, wait_for_previous

WORDS = 256
"""Payload words of 4 bytes that one program of one warp carries."""
_MOST_LOOKS = 1 << 26
"""About a minute of looking for what does not come; then the sum is not a number, and says so."""
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def all_reduce(
    x: torch.Tensor, inboxes: torch.Tensor, turns: torch.Tensor, broken: torch.Tensor, capacity: int, *,
    rank: int, size: int, overlap: bool,
) -> None:  # fmt: skip
    """Sum contiguous `x` over ranks, in place.

    inboxes: int64 [size], addresses of the ranks' memory, 2 x size x capacity words of 8 bytes each. turns: int32, a
    counter for every program; broken: int32 [1], not 0 ends all waiting.
    """
    words = x.numel() * x.element_size() // 4
    launch(
        _all_reduce,
        (triton.cdiv(words, WORDS),),
        x.view(-1).view(torch.int32), inboxes, turns, broken, words, capacity,
        RANK=rank, SIZE=size, WIDE=x.dtype is torch.float32, KIND=KINDS[x.dtype], WORDS=WORDS, LOOKS=_MOST_LOOKS,
        OVERLAP=overlap,
        num_warps=1, launch_pdl=overlap,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words"])
def _all_reduce(
    x: tl.tensor,
    inboxes: tl.tensor,
    turns: tl.tensor,
    broken: tl.tensor,
    words: tl.tensor,
    capacity: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    LOOKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program's share of one turn."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    lane = program * WORDS + tl.arange(0, WORDS)
    inside = lane < words
    turn = tl.load(turns + program) + 1
    half = (turn & 1).to(tl.int64) * SIZE * capacity
    own = tl.load(x + lane, mask=inside, other=0)
    sent = (own.to(tl.int64) & 0xFFFFFFFF) | (turn.to(tl.int64) << 32)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.int64))
            tl.store(inbox + half + RANK * capacity + lane, sent, mask=inside)
    mine = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64)) + half
    low = tl.zeros((WORDS,), tl.float32)
    high = tl.zeros((WORDS,), tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            got = own
        else:
            place = mine + source * capacity + lane
            word = tl.load(place, mask=inside, other=sent, volatile=True)
            missing = tl.sum(((word >> 32) != turn).to(tl.int32))
            looks = 0
            while (missing > 0) & (looks < LOOKS):
                word = tl.load(place, mask=inside, other=sent, volatile=True)
                missing = tl.sum(((word >> 32) != turn).to(tl.int32))
                looks = tl.where(tl.load(broken, volatile=True) != 0, LOOKS, looks + 1)
            if missing > 0:
                tl.store(broken, 1)
            got = tl.where(missing > 0, -1, (word & 0xFFFFFFFF).to(tl.int32))  # all ones is NaN in every format
        if WIDE:
            low += got.to(tl.float32, bitcast=True)
        else:
            low += got.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
            high += (got >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    if WIDE:
        result = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        second = high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32)
        result = first | (second << 16)
    tl.store(x + lane, result, mask=inside)
    tl.store(turns + program, turn)
