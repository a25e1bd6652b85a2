"""A checkpoint whose tensors go by other names than our model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.weights.source import TensorInfo, TensorSource


class RenamedSource:
    """`source` under the names that `rename` gives; ConfigError when two tensors end up with the same one."""

    def __init__(self, source: TensorSource, rename: Callable[[str], str]) -> None:
        self.where = source.where
        self._source = source
        self._theirs: dict[str, str] = {}
        for name in source.tensors:
            ours = rename(name)
            if ours in self._theirs:
                raise ConfigError(
                    f"{source.where}: tensors {self._theirs[ours]!r} and {name!r} are both {ours!r} to us"
                )
            self._theirs[ours] = name
        self.tensors: Mapping[str, TensorInfo] = {ours: source.tensors[theirs] for ours, theirs in self._theirs.items()}

    def __enter__(self) -> RenamedSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.__exit__(kind, error, trace)

    def read(self, name: str) -> torch.Tensor:
        """The tensor we call `name`."""
        return self._source.read(self._theirs[name])
