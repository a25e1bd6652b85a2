"""The few likeliest tokens of every row of logits, in two launches: torch's top-k takes several times as long here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd_ascend.backends.cuda.kernels.launch import launch, wait_for_previous

_BLOCK = 4096


def top_few(logits: torch.Tensor, count: int, *, overlap: bool) -> torch.Tensor:
    """float32 [R, V] -> the `count` likeliest tokens of each row, best first, the first of equals; int64 [R, count]."""
    rows, width = logits.shape
    parts = triton.cdiv(width, _BLOCK)
    score = torch.empty((rows, parts * count), dtype=torch.float32, device=logits.device)
    place = torch.empty((rows, parts * count), dtype=torch.int32, device=logits.device)
    tokens = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    if rows:
        launch(
            _few_of_parts,
            (rows, parts),
            logits, score, place, logits.stride(0), width, parts,
            COUNT=count, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=8, launch_pdl=overlap,
        )  # fmt: skip
        launch(
            _few,
            (rows,),
            score, place, tokens, parts * count,
            COUNT=count, LANES=triton.next_power_of_2(parts * count), OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize=["parts"])
def _few_of_parts(
    logits: tl.tensor,
    scores: tl.tensor,
    places: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    parts: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The best few of every BLOCK columns: the best, then the best of the others."""
    wait_for_previous(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = part * BLOCK + lane
    score = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < width, other=float("-inf"))
    score = tl.where(score != score, float("inf"), score)
    out = (row * parts + part) * COUNT
    for rank in tl.static_range(COUNT):
        top, at = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(scores + out + rank, top)
        tl.store(places + out + rank, part * BLOCK + at)
        score = tl.where(lane == at, float("-inf"), score)


@triton.jit(do_not_specialize=["held"])
def _few(
    scores: tl.tensor,
    places: tl.tensor,
    tokens: tl.tensor,
    held: tl.tensor,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The best few of a row's parts, which lie in the order of their columns."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    score = tl.load(scores + row * held + lane, mask=lane < held, other=float("-inf"))
    for rank in tl.static_range(COUNT):
        _, at = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(tokens + row * COUNT + rank, tl.load(places + row * held + at).to(tl.int64))
        score = tl.where(lane == at, float("-inf"), score)
