"""`linear` for few rows, with its weights under way while the kernels before it still run. Called by `linear.py`.

Few rows take as long as the weights take to arrive, and between two matrices lie kernels that read next to nothing. So
one warp asks for the first tiles of the weights at once, waits for the kernel before, asks for the input's, and from
then on replaces every tile that has been used; four warps multiply what has arrived. A program goes on to its next
columns without a pause. The products are those of `linear.py` in the same order, hence the same bits.

Written in Gluon, the layer of Triton in which memory and barriers have names. Its calls change between versions, so
`ops.py` tries the kernel out, and does without it where it does not give `linear`'s bits.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ssd_ascend.backends.cuda.kernels.launch import launch
from ssd_ascend.backends.cuda.kernels.linear import Tile

_REGISTERS: Final = 96
"""A thread's; without a bound the kernel takes all of a multiprocessor's, and its neighbours cannot start early."""
_RING_BYTES: Final = 216 * 1024
_DEPTH: Final = 256
_LEFT: Final = 64
"""Rows that the tensor cores want of their left operand."""
_CHUNK: Final = 64
"""Numbers of a row that lie together in shared memory: 128 bytes, as far as its swizzle reaches."""
_left, _chunk = gl.constexpr(_LEFT), gl.constexpr(_CHUNK)
_KINDS: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.9
_view = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)  # likewise


def choose_tile(rows: int, columns: int, processors: int, *, narrow: bool) -> Tile:
    """Measured (docs/performance.md): `stages` pieces in flight, each of `columns` x `depth` weights and of `rows` x
    `depth` of the input. 216 KB of shared memory: what a multiprocessor has in flight beats how many programs it holds.

    Rows of a tile that are not there are brought as well, as zeros. Tiles are narrow, where that is possible, if wide
    ones left half of the multiprocessors without any.
    """
    height = 8 if rows <= 8 else 16 if rows <= 16 else 32
    few = 2 * triton.cdiv(columns, _LEFT) <= processors
    width = _LEFT // 2 if narrow and few else _LEFT
    return Tile(height, width, _DEPTH, _RING_BYTES // ((height + width) * _DEPTH * 2), 4)


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    overlap: bool,
    processors: int,
    narrow: bool = True,
) -> None:
    """out = x [T, K] @ weight [N, K].T + bias, T at most `linear.MOST_FEW`, 16 bits a number; rows of both matrices
    start at multiples of 16 bytes. See `linear.linear` for `gated`. processors: the device's. narrow: whether tiles may
    be narrower than what the tensor cores take, which not every version of the language lets them be."""
    rows, depth = x.shape
    columns = weight.shape[0]
    tile = choose_tile(rows, columns, processors, narrow=narrow)
    launch(
        _few_rows,
        (min(processors, triton.cdiv(columns, tile.columns)),),
        _described(x, tile.rows),
        _described(weight, tile.columns),
        bias,
        out,
        rows,
        columns,
        K=depth,
        STAGES=tile.stages,
        PARTS=tile.depth // _CHUNK,
        GATED=gated,
        OVERLAP=overlap,
        num_warps=tile.warps,
        maxnreg=_REGISTERS,
        launch_pdl=overlap,
    )


def _described(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, _CHUNK], _KINDS[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [rows, _CHUNK], layout)


@gluon.jit(do_not_specialize=["rows"])
def _few_rows(
    x_tiles: tma.tensor_descriptor,
    w_tiles: tma.tensor_descriptor,
    bias: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    N: gl.tensor,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    GATED: gl.constexpr,
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:
    """Tiles of columns pid, pid + programs, ... one after the other, `steps` pieces each, of PARTS chunks."""
    height: gl.constexpr = x_tiles.block_shape[0]
    width: gl.constexpr = w_tiles.block_shape[0]
    steps: gl.constexpr = (K + PARTS * _chunk - 1) // (PARTS * _chunk)
    # the last chunk, too, is followed by memory that may be read
    chunks: gl.constexpr = STAGES * PARTS + _left // width - 1
    if OVERLAP:
        gdc_launch_dependents()
    w_ring = gl.allocate_shared_memory(w_tiles.dtype, [chunks, width, _chunk], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(w_tiles.dtype, [STAGES * PARTS, height, _chunk], x_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    pid, programs = gl.program_id(0), gl.num_programs(0)
    tiles = (gl.cdiv(N, width) - pid + programs - 1) // programs
    gl.warp_specialize(
        [
            (
                _multiply,
                (full, free, w_ring, x_ring, bias, out, rows, N, tiles, pid, programs, steps, PARTS, GATED, num_warps),
            ),
            (_fetch, (x_tiles, w_tiles, full, free, w_ring, x_ring, tiles, pid, programs, steps, PARTS, OVERLAP)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _fetch(
    x_tiles: tma.tensor_descriptor,
    w_tiles: tma.tensor_descriptor,
    full: gl.shared_memory_descriptor,
    free: gl.shared_memory_descriptor,
    w_ring: gl.shared_memory_descriptor,
    x_ring: gl.shared_memory_descriptor,
    tiles: gl.tensor,
    pid: gl.tensor,
    programs: gl.tensor,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """The warp that fetches. Nothing that a kernel before may have written is touched ahead of the wait for it."""
    stages: gl.constexpr = full.shape[0]
    width: gl.constexpr = w_ring.shape[1]
    num_bytes: gl.constexpr = (w_ring.shape[1] + x_ring.shape[1]) * _chunk * PARTS * 2
    pieces = tiles * STEPS
    for first in gl.static_range(stages):
        there = first < pieces
        mbarrier.expect(full.index(first), num_bytes, pred=there)
        column = (pid + first // STEPS * programs) * width
        _fetch_piece(w_tiles, w_ring, column, first % STEPS, full.index(first), first, there, PARTS)
    if OVERLAP:
        gdc_wait()
    for first in gl.static_range(stages):
        _fetch_piece(x_tiles, x_ring, 0, first % STEPS, full.index(first), first, first < pieces, PARTS)
    for piece in range(stages, pieces):
        stage = piece % stages
        column = (pid + piece // STEPS * programs) * width
        mbarrier.wait(free.index(stage), (piece // stages - 1) & 1)
        mbarrier.expect(full.index(stage), num_bytes)
        _fetch_piece(w_tiles, w_ring, column, piece % STEPS, full.index(stage), stage, True, PARTS)
        _fetch_piece(x_tiles, x_ring, 0, piece % STEPS, full.index(stage), stage, True, PARTS)


@gluon.jit
def _fetch_piece(
    tiles: tma.tensor_descriptor,
    ring: gl.shared_memory_descriptor,
    row: gl.tensor,
    step: gl.tensor,
    arrived: gl.shared_memory_descriptor,
    stage: gl.tensor,
    pred: gl.tensor,
    PARTS: gl.constexpr,
) -> None:
    """Piece `step` of the rows from `row` on."""
    for part in gl.static_range(PARTS):
        place = [row, (step * PARTS + part) * _chunk]
        _load(tiles, place, arrived, ring.index(stage * PARTS + part), pred=pred)


@gluon.jit
def _multiply(
    full: gl.shared_memory_descriptor,
    free: gl.shared_memory_descriptor,
    w_ring: gl.shared_memory_descriptor,
    x_ring: gl.shared_memory_descriptor,
    bias: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    N: gl.tensor,
    tiles: gl.tensor,
    pid: gl.tensor,
    programs: gl.tensor,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr,
    GATED: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:
    """The warps that multiply, weights on the left: the tensor cores want 64 rows there. A narrower tile is followed by
    whatever lies behind it, and by rows of the product that nobody stores. A piece is given back when the products of
    the next one are on their way."""
    stages: gl.constexpr = full.shape[0]
    width: gl.constexpr = w_ring.shape[1]
    height: gl.constexpr = x_ring.shape[1]
    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, height, 16])
    for tile in range(tiles):
        acc = gl.zeros([_left, height], gl.float32, products)
        first = tile * STEPS
        for piece in range(first, first + STEPS):
            stage = piece % stages
            mbarrier.wait(full.index(stage), (piece // stages) & 1)
            for part in gl.static_range(PARTS):
                chunk = w_ring.index(stage * PARTS + part)
                if width < _left:
                    chunk = _view(chunk, chunk.dtype, [_left, _chunk], chunk.layout)
                x = x_ring.index(stage * PARTS + part)
                acc = warpgroup_mma(chunk, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=PARTS, deps=(acc,))
            mbarrier.arrive(free.index((piece + stages - 1) % stages), count=1, pred=piece > first)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index((first + STEPS - 1) % stages), count=1)
        _store(acc, bias, out, rows, N, (pid + tile * programs) * width, width, GATED, num_warps)


@gluon.jit
def _store(
    acc: gl.tensor,
    bias: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    N: gl.tensor,
    first: gl.tensor,
    WIDTH: gl.constexpr,
    GATED: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:
    """Columns `first` to `first + WIDTH` of all rows, as `linear` leaves them."""
    width: gl.constexpr = acc.shape[0]
    height: gl.constexpr = acc.shape[1]
    products: gl.constexpr = acc.type.layout
    by_four: gl.constexpr = gl.BlockedLayout([1, 4], [128 // width, width // 4], [num_warps, 1], [1, 0])
    by_two: gl.constexpr = gl.BlockedLayout([1, 2], [128 // width, width // 4], [num_warps, 1], [1, 0])
    if bias is not None:
        n = first + gl.arange(0, width, gl.SliceLayout(1, products))
        acc += gl.expand_dims(gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32), 1)
    result = gl.convert_layout(gl.permute(acc.to(out.dtype.element_ty), (1, 0)), by_four)
    if GATED:
        gate, up = gl.split(gl.reshape(result, [height, width // 2, 2]))
        gate = gate.to(gl.float32)
        activated = (gate / (1.0 + gl.exp(-gate)) * up.to(gl.float32)).to(out.dtype.element_ty)
        _store_tile(gl.convert_layout(activated, by_two), out, rows, N // 2, first // 2, WIDTH // 2, by_two)
    else:
        _store_tile(result, out, rows, N, first, WIDTH, by_four)


@gluon.jit
def _store_tile(
    tile: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    width: gl.tensor,
    first: gl.tensor,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """A block of `out` [rows, width], WIDTH columns from `first` on."""
    m = gl.expand_dims(gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    n = gl.expand_dims(gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    inside = (m < rows) & (n < WIDTH) & (first + n < width)
    gl.store(out + m.to(gl.int64) * width + first + n, tile, mask=inside)
