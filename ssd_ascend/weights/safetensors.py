"""Safetensors checkpoints: one `model.safetensors`, or the shards its index lists and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ssd_ascend.errors import ConfigError
from ssd_ascend.weights.source import TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class SafetensorsSource:
    """The tensors of a model directory; a context manager."""

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self._stack = ExitStack()
        self._handles: dict[Path, Any] = {}
        self._holes: set[Path] = set()
        """Files that take far less room than they have bytes, as downloads do that were broken off."""
        try:
            self.tensors: Mapping[str, TensorInfo] = self._index(directory)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file; copy it to keep it."""
        file = self.tensors[name].file
        tensor: torch.Tensor = self._handles[file].get_tensor(name)
        if tensor.dim() > 1 and file in self._holes and not tensor.any():
            held = file.stat()
            raise ConfigError(
                f"{file}: tensor {name!r} is all zeros, and of {held.st_size} bytes {512 * held.st_blocks} are there",
                remedy="download it again; a checkpoint that a benchmark laid out is read where bench.checkpoints is "
                "installed",
            )
        return tensor

    def _index(self, directory: Path) -> dict[str, TensorInfo]:
        index = directory / INDEX
        if not index.is_file():
            return self._open(directory / SINGLE)
        infos: dict[str, TensorInfo] = {}
        wanted = _weight_map(index)
        for file in dict.fromkeys(wanted.values()):
            found = self._open(directory / file)
            for name in (name for name, home in wanted.items() if home == file):
                if name not in found:
                    raise ConfigError(
                        f"{directory / file} has no tensor {name!r}, although {INDEX} says so",
                        remedy="download it again",
                    )
                infos[name] = found[name]
        return infos

    def _open(self, file: Path) -> dict[str, TensorInfo]:
        if not file.is_file():
            raise ConfigError(f"missing weights file: {file}", remedy="download the whole checkpoint")
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{file} is not a complete safetensors file: {error}", remedy="download it again"
            ) from error
        except RuntimeError as error:  # how torch says that a mapping was refused
            raise ConfigError(
                f"cannot map {file}: {error}", remedy="give this machine more memory, or lift its limit (ulimit -v)"
            ) from error
        self._handles[file] = handle
        held = file.stat()
        if 512 * held.st_blocks < held.st_size // 2:
            self._holes.add(file)
        return {name: _info(handle.get_slice(name), name, file) for name in handle.keys()}  # noqa: SIM118  not a dict


def _info(view: Any, name: str, file: Path) -> TensorInfo:
    """What the header says of one tensor."""
    kind = view.get_dtype()
    if kind not in _DTYPES:
        raise ConfigError(
            f"{file}: tensor {name!r} has dtype {kind}, which is not supported", remedy="use a bf16 checkpoint"
        )
    shape, dtype = tuple(view.get_shape()), _DTYPES[kind]
    return TensorInfo(shape, dtype, file, torch.Size(shape).numel() * dtype.itemsize)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of a sharded checkpoint has it."""
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{index} is not a readable index of shards: {error!r}", remedy="download it again"
        ) from error
    for name, file in entries.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(
                f"{index}: the file of {name!r} is {file!r}, expected a name beside the index",
                remedy="download it again",
            )
    return dict(entries)
