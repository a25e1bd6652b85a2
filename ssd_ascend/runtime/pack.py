"""Index numbers of a captured step: named arrays in one device buffer, filled on the host and sent in one copy.

`graphs.py` and the drafters make their static inputs of it; `to_device` sends what has no place there, `Arriving` is
the way back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_STAGES = 4
"""Host buffers: one is filled while the copies of others may still be under way."""
_COVERED = 2
"""So many copies share an event, that of the last one: each step asks the device for one thing more, not for two."""


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
        self.buffer = torch.zeros(_words(fields), dtype=torch.int64, pin_memory=device.type != "cpu")
        self.whole = self.buffer.numpy().data.cast("B")
        """All of it, for whoever writes several arrays at once."""
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
        shared = range(0 if device.type == "cpu" else _STAGES // _COVERED)
        self._sent = [torch.Event(device=device) for _ in shared]
        """Behind the copies of each `_COVERED` buffers that follow each other."""
        self._aside: torch.Tensor | None = None
        self._turn = _STAGES - 1
        """The buffer that is sent next."""
        self.send()

    def next(self) -> Stage:
        """A host buffer that no copy reads any more, the same until `send`; it still holds what was written there
        before."""
        if self._sent and self._turn % _COVERED == 0:
            sent = self._sent[self._turn // _COVERED]
            if not sent.query():  # two steps ago and more: hardly ever
                sent.synchronize()
        return self._stages[self._turn]

    def send(self) -> None:
        """Queue the copy of the buffer that `next` gave."""
        self._buffer.copy_(self._stages[self._turn].buffer, non_blocking=True)
        if self._sent and self._turn % _COVERED == _COVERED - 1:
            self._sent[self._turn // _COVERED].record()
        self._turn = (self._turn + 1) % _STAGES

    def send_aside(self) -> None:
        """Queue the same copy to where nobody looks; see `engine/practice.py`."""
        if self._aside is None:
            self._aside = torch.empty_like(self._buffer)
        self._aside.copy_(self._stages[self._turn].buffer, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same numbers where a copy to `device` is queued from; the allocator keeps them until it is over.

    From other host memory some devices copy only once the host has waited for all that is queued.
    """
    return tensor.pin_memory() if tensor.device.type == "cpu" != device.type else tensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Queue a copy to the device of what may be forgotten at once."""
    return pinned(tensor, device).to(device, non_blocking=True)


def index_on(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Numbers that an operator there looks up or picks by, int64; their copy is queued."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


class Arriving:
    """A small tensor on its way to the host; whoever needs it waits for it then, which is mostly no wait at all. An
    `Awaited`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = tensor.clone() if tensor.device.type == "cpu" else tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.Event(device=tensor.device)
            self._event.record()
        self._array = self._host.numpy()  # which makes lists in a third of the time
        self._values: list[list[int]] | None = None

    def is_there(self) -> bool:
        """See `Awaited`."""
        return self._values is not None or self._event is None or self._event.query()

    def row(self, index: int) -> list[int]:
        """Row `index` of the matrix that was sent."""
        return self.rows()[index]

    def rows(self) -> list[list[int]]:
        """See `Awaited`."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._array.tolist()
        return self._values


class Picked(NamedTuple):
    """Some rows of what is on its way. An `Awaited`."""

    arriving: Arriving
    wanted: list[int]

    def is_there(self) -> bool:
        """See `Awaited`."""
        return self.arriving.is_there()

    def rows(self) -> list[list[int]]:
        """See `Awaited`."""
        values = self.arriving.rows()
        return [values[index] for index in self.wanted]


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


def write(array: np.ndarray, values: np.ndarray | Sequence[int], *, rest: int | None = None) -> None:
    """Put `values` at the front of `array`'s last axis, and `rest` (where given) behind them."""
    count = values.shape[-1] if isinstance(values, np.ndarray) else len(values)
    array[..., :count] = values
    if rest is not None:
        array[..., count:] = rest
