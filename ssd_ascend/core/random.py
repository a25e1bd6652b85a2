"""Counter-based uniform numbers: a pure function of (seed, position, stream), the same on every device and batch.

A position of a sequence is tested, recovered and drafted at most once each with effect, so one number per position and
purpose is enough, and no generator state exists that a neighbour, a preemption or a lost worker could disturb. The
streams keep the draft's randomness independent of the target's, which exact verification requires. Torch-free.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


class Stream(enum.IntEnum):
    """Which decision a number is for."""

    RECOVER = 1
    """The target's own token at a position."""
    ACCEPT = 2
    """The test of a draft token at a position."""
    DRAFT = 3
    """The draft's token at a position."""


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finalizer (Steele, Lea, Flood 2014), element by element."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike, stream: Stream) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1) with 24 random bits, broadcast over seeds (uint64) and positions (>= 0); exact in float32."""
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        key = _mix(seed + _GOLDEN * np.uint64(int(stream)))
        bits = _mix(_mix(key + _GOLDEN * (position + np.uint64(1))))
    return ((bits >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def derive_seed(seed: int, index: int) -> int:
    """The seed of the index-th answer to one request (index 0 keeps `seed`), as an unsigned 64-bit number."""
    if index == 0:
        return seed & _MASK
    with np.errstate(over="ignore"):
        mixed = _mix(np.asarray([(seed + index * int(_GOLDEN)) & _MASK], dtype=np.uint64))
    return int(mixed[0])
