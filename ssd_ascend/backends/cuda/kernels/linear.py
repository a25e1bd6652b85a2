"""x @ weight.T with the weights streamed once: the kernel behind every matrix, from one decode row to a long prefill
(few rows: `few_rows.py`, where that runs).

Each output element is one chain of tensor-core products over K in ascending order, whatever the tile: no split over K,
no change of algorithm with the number of rows. Measured on Hopper (docs/performance.md): all tiles below give bitwise
the same result, so a token's result depends neither on its neighbours nor on how it was batched.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ssd_ascend.backends.cuda.kernels.launch import fetch_ahead, launch, wait_for_previous

_GROUP = 8
"""Row tiles that share their weight tiles in the second-level cache, when there are many of both."""


MOST_FEW = 32
"""Rows of what `few_rows.py` multiplies."""


class FewRows(Protocol):
    """`few_rows.few_rows`, for one device."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *,
        gated: bool,
        overlap: bool,
    ) -> None: ...


class Tile(NamedTuple):
    """How the output is cut. `swap`: weights are the left operand of the tensor cores, which want 64 rows of it."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    swap: bool = True


def choose_tile(rows: int, columns: int, itemsize: int, *, bulk: bool) -> Tile:
    """The tile for [rows, K] @ [columns, K].T: a measured table (docs/performance.md). Bits do not depend on it."""
    if itemsize > 2:
        return Tile(16, 32, 32, 3, 4, swap=False) if rows <= 16 else Tile(64, 64, 32, 3, 4, swap=False)
    if not bulk:
        return _small_tile(rows)
    if rows <= 16:
        return Tile(16, 64, 256, 5, 4)
    if rows <= 32:
        return Tile(32, 64, 256, 4, 4) if columns <= 8192 else Tile(32, 128, 64, 8, 4)
    if rows <= 64:
        return _middle_tile(columns)
    if rows <= 128 and columns <= 8192:
        return Tile(64, 64, 128, 6, 4) if columns <= 4096 else Tile(128, 64, 64, 8, 4)
    if rows <= 128:
        return Tile(128, 256, 64, 4, 8)
    if rows <= 256 and columns <= 8192:
        return Tile(128, 64, 64, 6, 4) if columns <= 4096 else Tile(128, 128, 64, 6, 8)
    if 256 < rows <= 512:
        return Tile(64, 256, 64, 5, 4, swap=False)
    return Tile(256, 128, 64, 4, 8)


def _middle_tile(columns: int) -> Tile:
    """For 33 to 64 rows: narrow enough for every multiprocessor to have one."""
    if columns <= 4096:
        return Tile(64, 32, 128, 6, 4, swap=False)
    return Tile(64, 64, 64, 8, 4) if columns <= 8192 else Tile(64, 128, 128, 4, 4)


def _small_tile(rows: int) -> Tile:
    """For devices without the bulk copy engine, and matrices that it does not read: 160 KB of shared memory at most."""
    if rows <= 16:
        return Tile(16, 64, 128, 8, 4)
    if rows <= 32:
        return Tile(32, 64, 128, 6, 4)
    return Tile(64, 64, 128, 4, 4) if rows <= 64 else Tile(128, 128, 64, 4, 8)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    overlap: bool,
    bulk: bool = False,
    ahead: int = 0,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    few_rows: FewRows | None = None,
) -> torch.Tensor:
    """x [T, K] (rows may be strided) @ weight [N, K].T + bias -> [T, N] in `dtype`, by default x's.

    bulk: tiles come through the bulk copy engine, where both matrices allow it. gated: rows of weight alternate between
    gate and up, and the result is silu(gate) * up, [T, N / 2]. few_rows: does up to MOST_FEW rows, where it can.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    out = torch.empty((rows, columns // 2 if gated else columns), dtype=dtype or x.dtype, device=x.device)
    if not rows:
        return out
    bulk = bulk and x.element_size() <= 2 and _can_be_described(x) and _can_be_described(weight)
    if few_rows is not None and bulk and rows <= MOST_FEW:
        few_rows(x, weight, bias, out, gated=gated, overlap=overlap)
        return out
    tile = choose_tile(rows, columns, x.element_size(), bulk=bulk)
    x_tiles = w_tiles = None
    if bulk:
        x_tiles = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        w_tiles = TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth])
    grid = (triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows),)
    launch(
        _linear,
        grid,
        x,
        weight,
        x_tiles,
        w_tiles,
        bias,
        out,
        rows,
        columns,
        x.stride(0),
        K=depth,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        AHEAD=ahead if rows <= 64 and depth >= ahead else 0,
        GROUP=_GROUP if rows > tile.rows else 1,
        SWAP=tile.swap,
        GATED=gated,
        OVERLAP=overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=overlap,
    )
    return out


def _can_be_described(matrix: torch.Tensor) -> bool:
    """Whether the bulk copy engine reads it: rows at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    x_tiles: tl.tensor_descriptor,
    w_tiles: tl.tensor_descriptor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    N: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [rows, N] = x [rows, K] @ weight [N, K].T + bias. AHEAD: columns of weight to fetch before x is there.

    x_tiles, w_tiles: the same matrices for the bulk copy engine, which gives zeros beyond their edges; or None.
    """
    pid = tl.program_id(0)
    if GROUP == 1:
        pid_n, pid_m = pid, 0
    else:
        wide = tl.cdiv(N, BLOCK_N) * GROUP
        first_m = pid // wide * GROUP
        height = min(tl.cdiv(rows, BLOCK_M) - first_m, GROUP)
        pid_m = first_m + pid % wide % height
        pid_n = pid % wide // height
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = n < N
    first = weight + tl.where(inside, n, 0).to(tl.int64)[:, None] * K
    if AHEAD > 0:
        fetch_ahead(first + tl.arange(0, AHEAD // 64)[None, :] * 64)
    wait_for_previous(OVERLAP)
    w_tile = first + k[None, :]
    x_tile = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    here = (m < rows)[:, None]
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if w_tiles is not None:
            w = w_tiles.load([pid_n * BLOCK_N, start])
            a = x_tiles.load([pid_m * BLOCK_M, start])
        elif K % BLOCK_K == 0:
            w = tl.load(w_tile + start)
            a = tl.load(x_tile + start, mask=here, other=0.0)
        else:
            w = tl.load(w_tile + start, mask=(start + k < K)[None, :], other=0.0)
            a = tl.load(x_tile + start, mask=here & (start + k < K)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    if GATED:
        pairs = tl.reshape(result, (BLOCK_M, BLOCK_N // 2, 2))
        gate, up = tl.split(pairs)
        gate = gate.to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(out.dtype.element_ty)
        n = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    width = N // 2 if GATED else N
    target = out + m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(target, result, mask=here & (n < width)[None, :])
