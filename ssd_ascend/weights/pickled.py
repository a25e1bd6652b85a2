"""`pytorch_model.bin` of older EAGLE heads, through torch's restricted unpickler: tensors only, no code.

Nothing else here reads pickles; models must come as safetensors or gguf.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.weights.source import TensorInfo

PICKLE = "pytorch_model.bin"


class PickleSource:
    """The tensors of one file; a context manager, after which they may be freed."""

    def __init__(self, file: Path) -> None:
        self.where = str(file)
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"{file} is not a readable file of plain tensors: {type(error).__name__}",
                remedy="convert it to safetensors, or download it again",
            ) from error
        if not isinstance(loaded, dict) or any(not isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
            raise ConfigError(f"{file} does not hold a table of tensors", remedy="convert it to safetensors")
        self._loaded: dict[str, torch.Tensor] = loaded
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype, file, tensor.nbytes) for name, tensor in loaded.items()
        }

    def __enter__(self) -> PickleSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loaded.clear()

    def read(self, name: str) -> torch.Tensor:
        """The tensor."""
        return self._loaded[name]
