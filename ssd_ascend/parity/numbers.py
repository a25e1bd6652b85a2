"""Test inputs that are the same bits on every machine, so that a golden run need not carry them.

Made of integers by `core.random`, whose arithmetic is exact everywhere, and representable in bfloat16, so that no dtype
rounds them. Used by every other file of this room.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch

from ssd_ascend.core.random import Stream, uniforms

_PARTS = 4


def normal(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Nearly normal numbers, float32 of `shape`; `name` is the seed."""
    places, seed = np.arange(math.prod(shape)), zlib.crc32(name.encode())
    total = sum(uniforms(seed + part, places, Stream.DRAFT) for part in range(_PARTS))
    deviates = (np.asarray(total, np.float32) - np.float32(_PARTS / 2)) * np.float32(math.sqrt(12 / _PARTS))
    numbers = torch.from_numpy(deviates * np.float32(scale) + np.float32(mean))
    return numbers.to(torch.bfloat16).float().view(shape)


def integers(name: str, *shape: int, low: int, high: int) -> torch.Tensor:
    """Whole numbers in [low, high), int64 of `shape`."""
    places = np.arange(math.prod(shape))
    draws = uniforms(zlib.crc32(name.encode()), places, Stream.RECOVER).astype(np.float64)
    return torch.from_numpy((draws * (high - low)).astype(np.int64) + low).view(shape)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A fingerprint of names, shapes and bits."""
    seen = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        seen.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
