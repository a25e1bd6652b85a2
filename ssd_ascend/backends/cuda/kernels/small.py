"""The operators between the matrices: norms, gated activation, rotation with the cache write. One launch each.

Every row is reduced inside one program in an order that its width alone decides, so neighbours never change its bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ssd_ascend.backends.cuda.kernels.launch import launch, wait_for_previous, wait_then_release

_HEADS_TOGETHER, _MANY_TOKENS = 8, 16
"""From so many tokens on, one program turns several heads: programs of one head each would queue for processors."""


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, overlap: bool
) -> torch.Tensor:
    """RMSNorm of x [..., H] (of x + residual, which then goes into `residual`), in float32 -> x's shape and dtype."""
    width = x.shape[-1]
    shaped = x.unflatten(0, (1, -1)) if x.dim() == 2 else x.reshape(-1, *x.shape[-2:])
    assert shaped.stride(-1) == 1, "a norm reads rows of adjacent numbers"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = shaped.shape[0] * shaped.shape[1]
    if not rows:
        return out
    block = triton.next_power_of_2(width)
    launch(
        _rms_norm,
        (rows,),
        shaped,
        residual,
        weight,
        out,
        shaped.shape[1],
        shaped.stride(0),
        shaped.stride(1),
        eps,
        WIDTH=width,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=overlap,
    )
    return out


@triton.jit(do_not_specialize=["inner"])
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    place = row // inner * outer_stride + row % inner * inner_stride + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty)
        tl.store(residual + row * WIDTH + column, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    tl.store(out + row * WIDTH + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: torch.Tensor, *, overlap: bool) -> torch.Tensor:
    """x [T, 2 * I] -> silu(first half) * second half, [T, I]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        launch(
            _silu_and_mul,
            (rows, triton.cdiv(width, 1024)),
            x,
            out,
            x.stride(0),
            width,
            BLOCK=1024,
            OVERLAP=overlap,
            num_warps=4,
            launch_pdl=overlap,
        )
    return out


@triton.jit
def _silu_and_mul(
    x: tl.tensor, out: tl.tensor, x_stride: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(OVERLAP)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, overlap: bool) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place; their tokens may be strided."""
    tokens, heads, _ = q.shape
    if not tokens:
        return
    rotary_dim = cos_sin.shape[1]
    launch(
        _rotary,
        (tokens, heads + k.shape[1]),
        q,
        k,
        positions,
        cos_sin,
        heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HALF=rotary_dim // 2,
        BLOCK=triton.next_power_of_2(rotary_dim // 2),
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotary(
    q: tl.tensor,
    k: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_heads: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    wait_for_previous(OVERLAP)
    table = cos_sin + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(table + d, mask=inside, other=0.0)
    sin = tl.load(table + HALF + d, mask=inside, other=0.0)
    if head < q_heads:
        base = q + token * q_stride + head * q_head_stride
    else:
        base = k + token * k_stride + (head - q_heads) * k_head_stride
    first = tl.load(base + d, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(base + d, (first * cos - second * sin).to(q.dtype.element_ty), mask=inside)
    tl.store(base + HALF + d, (second * cos + first * sin).to(q.dtype.element_ty), mask=inside)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """Rotate q [T, Hq, D] in place; write the rotated k and v [T, Hkv, D] to their slots of kv; slot -1 is skipped."""
    tokens, heads, width = q.shape
    half, kv_heads = cos_sin.shape[1] // 2, k.shape[1]
    together = math.gcd(heads, kv_heads, _HEADS_TOGETHER) if tokens >= _MANY_TOKENS else 1
    if tokens:
        launch(
            _rotate_and_store,
            (tokens, (heads + kv_heads) // together),
            q, k, v, kv, slot_mapping, positions, cos_sin,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], kv.stride(0),
            Q_HEADS=heads, KV_HEADS=kv_heads, TOGETHER=together, WIDTH=width, HALF=half,
            BLOCK_HALF=triton.next_power_of_2(half), BLOCK=triton.next_power_of_2(width),
            OVERLAP=overlap, num_warps=2 if together > 4 else 1, launch_pdl=overlap,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotate_and_store(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,
    slot_mapping: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    half: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program for TOGETHER heads of a token, which are all queries, or all keys and their values."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOGETHER
    head = first + tl.arange(0, TOGETHER)[:, None]
    d, whole = tl.arange(0, BLOCK_HALF)[None, :], tl.arange(0, BLOCK)[None, :]
    turns = d < HALF
    wait_then_release(OVERLAP)  # attention reads ahead
    table = cos_sin + tl.load(positions + token) * (2 * HALF) + d
    cos = tl.load(table, mask=turns, other=0.0)
    sin = tl.load(table + HALF, mask=turns, other=0.0)
    if first < Q_HEADS:
        place = q + token * q_stride + head * q_head_stride + d
        _turn(place, place, cos, sin, turns & (head >= 0), HALF)
    else:
        head -= Q_HEADS
        slot = tl.load(slot_mapping + token)
        kept = (slot >= 0) & (head >= 0)
        source = k + token * k_stride + head * k_head_stride
        target = kv + slot * (KV_HEADS * WIDTH) + head * WIDTH
        _turn(source + d, target + d, cos, sin, turns & kept, HALF)
        if WIDTH > 2 * HALF:
            rest = kept & (whole >= 2 * HALF) & (whole < WIDTH)
            tl.store(target + whole, tl.load(source + whole, mask=rest).to(kv.dtype.element_ty), mask=rest)
        kept &= whole < WIDTH
        value = tl.load(v + token * v_stride + head * v_head_stride + whole, mask=kept)
        tl.store(target + half.to(tl.int64) + whole, value.to(kv.dtype.element_ty), mask=kept)


@triton.jit
def _turn(
    source: tl.tensor, target: tl.tensor, cos: tl.tensor, sin: tl.tensor, mask: tl.tensor, HALF: tl.constexpr
) -> None:
    """Rotate pairs HALF apart from `source` to `target`. Sums are fused explicitly: the same bits in any shape."""
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, tl.fma(low, cos, -(high * sin)).to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, tl.fma(high, cos, low * sin).to(target.dtype.element_ty), mask=mask)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor, *, overlap: bool) -> None:
    """Write k, v [T, Hkv, D] into kv [2, blocks, block_size, Hkv, D] at their slots; slot -1 is skipped."""
    tokens, heads, width = k.shape
    if tokens:
        launch(
            _store,
            (tokens, heads),
            k, v, kv, slot_mapping, *k.stride()[:2], *v.stride()[:2], kv.stride(0),
            HEADS=heads, WIDTH=width, BLOCK=triton.next_power_of_2(width),
            OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _store(
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,
    slot_mapping: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program per token and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    wait_then_release(OVERLAP)  # attention reads ahead
    slot = tl.load(slot_mapping + token)
    kept = (d < WIDTH) & (slot >= 0)
    target = kv + slot * (HEADS * WIDTH) + head * WIDTH + d
    key = tl.load(k + token * k_stride + head * k_head_stride + d, mask=kept)
    value = tl.load(v + token * v_stride + head * v_head_stride + d, mask=kept)
    tl.store(target, key.to(kv.dtype.element_ty), mask=kept)
    tl.store(target + half.to(tl.int64), value.to(kv.dtype.element_ty), mask=kept)
