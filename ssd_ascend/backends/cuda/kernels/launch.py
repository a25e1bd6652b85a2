"""What all kernels share: launching, compiling ahead, overlapping one launch with the next, fetching weights ahead.

Programmatic dependent launch lets a kernel start while the one before it still runs. Every kernel here lets its
successor start at once, and then waits for its predecessor to end before it touches anything that a kernel may write;
before that wait it may only fetch weights. So several can be there at a time, and order holds along the whole chain:
none ends before its own wait is over, which is when its predecessor has ended, which waited for the one before. Where
a successor has more to read early, a kernel lets it start after its own wait instead (`wait_then_release`).
https://docs.nvidia.com/cuda/cuda-c-programming-guide/ (section of that name).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

_asked: ContextVar[set[Any] | None] = ContextVar("asked", default=None)
"""Inside `compiling`, the kernels that it was asked for."""
_MOST_COMPILERS = 16


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Queue a kernel; inside `compiling`, see to it that it is compiled and launch nothing."""
    asked = _asked.get()
    if asked is None:
        kernel[grid](*args, **options)
        return
    key = (kernel, tuple(map(_kind, args)), tuple(options.items()))
    if key not in asked:
        asked.add(key)
        kernel.warmup(*args, grid=grid, **options)


def _kind(value: Any) -> Any:
    """What a compiler may make a difference of; asking for a kernel twice costs it a millisecond."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if (block := getattr(value, "block_shape", None)) is not None:  # a descriptor, of Triton's or of Gluon's
        return value.base.dtype, tuple(block)
    return (value == 1, value % 16 == 0, value >> 31) if isinstance(value, int) else value


@contextmanager
def compiling() -> Iterator[None]:
    """What is launched inside is compiled, all of it side by side, and has been when this ends; nothing runs.

    A kernel takes half a second, most of it outside the interpreter, and a server needs some dozens of them.
    """
    before = _asked.set(set())
    try:
        with (
            ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as pool,
            _Zeroed(),
            triton.AsyncCompileMode(pool),
        ):
            yield
    finally:
        _asked.reset(before)


class _Zeroed(TorchDispatchMode):
    """Fresh memory holds zeros: kernels that were not run leave valid indices to the operators behind them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            result.zero_()
        return result


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr) -> None:
    """Let the kernel after this one start, then hold until the one before has ended and its writes are visible. Every
    program of every kernel comes by here before it ends: the order of all depends on it."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_then_release(OVERLAP: tl.constexpr) -> None:
    """Likewise, but the kernel after this one starts once the one before this has ended: what was written up to there,
    it may read ahead of its own wait."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(address: tl.tensor) -> None:
    """Ask for the cache lines at `address` (a block of pointers) to be brought into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
