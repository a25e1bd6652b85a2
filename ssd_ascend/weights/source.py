"""What every checkpoint format offers the loader: names and shapes first, then one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import torch


class TensorInfo(NamedTuple):
    """A tensor as its header describes it. num_bytes: what reading it takes, for progress."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    num_bytes: int


class TensorSource(Protocol):
    """An open checkpoint, closed at the end of its `with` block; names are those of HF in any case."""

    where: str
    """Names the checkpoint in messages."""
    tensors: Mapping[str, TensorInfo]
    """All tensors of the checkpoint, in an order that is cheap to read."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU; may be a view of the file that is valid while the source is open."""
        ...

    def __enter__(self) -> TensorSource: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
