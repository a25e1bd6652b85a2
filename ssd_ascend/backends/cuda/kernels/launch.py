"""What all kernels share: overlapping one launch with the next, fetching weights ahead.

Programmatic dependent launch lets a kernel start while the one before it still runs. Every kernel here waits for its
predecessor before it touches anything a predecessor may write or read, so order holds along the whole chain; before
that wait it may only fetch weights. https://docs.nvidia.com/cuda/cuda-c-programming-guide/ (section of that name).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr) -> None:
    """Hold until the kernel before this one has finished and its writes are visible; then let the next one start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(address: tl.tensor) -> None:
    """Ask for the cache lines at `address` (a block of pointers) to be brought into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
