"""Index numbers of a captured step: named arrays in one device buffer, filled on the host and sent in one copy.

`graphs.py` and `rollout.py` make their static inputs of it; `Arriving` is the way back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

_STAGES = 2
"""Host buffers: one is filled while the other's copy may still be under way."""


class Field(NamedTuple):
    """The shape of one array, its element type, and what it holds before anything was sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64
    initial: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return math.prod(self.shape) * self.dtype.itemsize


class Stage:
    """One host buffer, cut as the device's. `tables[i]` is the block table that row i of `table` holds already."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        pinned = device.type != "cpu"
        self.buffer = torch.zeros(_words(fields), dtype=torch.int64, pin_memory=pinned)
        self.sent = torch.Event(device=device) if pinned else None
        self.tables: list[list[int]] = []
        self.arrays = {name: part.numpy() for name, part in _cut(self.buffer, fields).items()}
        for name, field in fields.items():
            self.arrays[name].fill(field.initial)


class Pack:
    """`device[name]` are the tensors of a captured step; fill what `next` gives, then `send`."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        # 8-byte numbers first, so that every array is aligned for its own type
        ordered = dict(sorted(fields.items(), key=lambda item: -item[1].dtype.itemsize))
        self._buffer = torch.zeros(_words(ordered), dtype=torch.int64, device=device)
        self.device: dict[str, torch.Tensor] = _cut(self._buffer, ordered)
        self._stages = [Stage(ordered, device) for _ in range(_STAGES)]
        self._turn = 0
        self.send()

    def next(self) -> Stage:
        """A host buffer that no copy reads any more; it still holds what was written two turns ago."""
        self._turn = (self._turn + 1) % _STAGES
        stage = self._stages[self._turn]
        if stage.sent is not None:
            stage.sent.synchronize()
        return stage

    def send(self) -> None:
        """Queue the copy of the buffer that `next` gave."""
        stage = self._stages[self._turn]
        self._buffer.copy_(stage.buffer, non_blocking=True)
        if stage.sent is not None:
            stage.sent.record()


class Arriving:
    """A small tensor on its way to the host; whoever needs it waits for it then, which is mostly no wait at all."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = tensor.clone() if tensor.device.type == "cpu" else tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.Event(device=tensor.device)
            self._event.record()
        self._values: list[list[int]] | None = None

    def row(self, index: int) -> list[int]:
        """Row `index` of the matrix that was sent."""
        return self.rows()[index]

    def rows(self) -> list[list[int]]:
        """All of it."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._host.tolist()
        return self._values


def _words(fields: Mapping[str, Field]) -> int:
    return sum(-(-field.num_bytes // 8) for field in fields.values())


def _cut(buffer: torch.Tensor, fields: Mapping[str, Field]) -> dict[str, torch.Tensor]:
    """Views of `buffer`, each from an 8-byte boundary on."""
    parts, start = {}, 0
    for name, field in fields.items():
        end = start + -(-field.num_bytes // 8)
        flat = buffer[start:end].view(field.dtype)
        parts[name] = flat[: math.prod(field.shape)].view(field.shape)
        start = end
    return parts


def write(array: np.ndarray, values: np.ndarray, *, rest: int | None = None) -> None:
    """Put `values` at the front of `array`'s last axis, and `rest` (where given) behind them."""
    count = values.shape[-1]
    array[..., :count] = values
    if rest is not None:
        array[..., count:] = rest
