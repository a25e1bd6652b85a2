"""A `.gguf` file as a checkpoint: llama.cpp's names and layouts turned back into HF's, dequantised tensor by tensor.

The header is walked by our own reader (the `gguf` package takes seconds over a 49k vocabulary); the package's
`dequantize` does the arithmetic of the quantised encodings.
"""

from __future__ import annotations

import importlib
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ssd_ascend.config.model import ModelConfig, model_config_from_gguf
from ssd_ascend.errors import ConfigError
from ssd_ascend.text.gguf_metadata import GgufTensor, read_gguf_metadata, read_gguf_tensors
from ssd_ascend.weights.source import TensorInfo

ROPE_FREQUENCIES = "rope_freqs.weight"  # belongs to the config: it is how llama3 scaling is written
_CHUNK = 1 << 22  # elements dequantised at a time: float32 of one chunk is 16 MB
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED = ("llama",)  # families whose q and k rows llama.cpp reorders so that rotary pairs lie side by side


def read_gguf_config(path: Path) -> ModelConfig:
    """The model's config from the metadata, and from those tensors that are settings in disguise."""
    metadata = read_gguf_metadata(path, lambda key: not key.startswith("tokenizer.") or key.endswith("_token_id"))
    tensors = read_gguf_tensors(path)
    factors = None
    if ROPE_FREQUENCIES in tensors:
        with GgufFile(path, tensors) as file:
            factors = tuple(file.read(ROPE_FREQUENCIES, torch.float32).tolist())
    vocab_key = f"{metadata.get('general.architecture')}.vocab_size"
    if vocab_key not in metadata and "token_embd.weight" in tensors:
        metadata[vocab_key] = tensors["token_embd.weight"].shape[0]
    return model_config_from_gguf(metadata, where=str(path), tensors=tensors, frequency_factors=factors)


class GgufSource:
    """The tensors of a `.gguf` under HF names, in `dtype`; a context manager."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self.where = str(path)
        self._config = config
        self._dtype = dtype
        self._file = GgufFile(path, read_gguf_tensors(path))
        self._names = {hf_name(name): name for name in self._file.tensors if name != ROPE_FREQUENCIES}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(self._file.tensors[theirs].shape, dtype, path, self._file.num_bytes(theirs))
            for name, theirs in self._names.items()
        }

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the serving dtype, rows in HF's order."""
        tensor = self._file.read(self._names[name], self._dtype)
        if self._config.family not in _INTERLEAVED:
            return tensor
        if ".q_proj." in name:
            return halves_from_pairs(tensor, self._config.num_heads)
        return halves_from_pairs(tensor, self._config.num_kv_heads) if ".k_proj." in name else tensor


class GgufFile:
    """A mapped `.gguf` whose tensors are decoded on demand."""

    def __init__(self, path: Path, tensors: Mapping[str, GgufTensor]) -> None:
        self.tensors = tensors
        self._path = path
        self._gguf = _gguf_package()
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for name, tensor in tensors.items():
            if tensor.offset + self.num_bytes(name) > len(self._data):
                self.close()
                raise ConfigError(f"{path} ends inside tensor {name!r}", remedy="download it again")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._data.close()

    def num_bytes(self, name: str) -> int:
        """Size in the file."""
        tensor = self.tensors[name]
        block, size = self._block(name)
        return torch.Size(tensor.shape).numel() // block * size

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, dequantised by chunks of rows so that float32 never exists for all of it."""
        tensor, kind = self.tensors[name], self._gguf.GGMLQuantizationType(self.tensors[name].kind)
        block, size = self._block(name)
        columns = tensor.shape[-1]
        rows = torch.Size(tensor.shape[:-1]).numel()
        row_bytes = columns // block * size
        step = max(1, _CHUNK // columns)
        out = torch.empty((rows, columns), dtype=dtype)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            at = tensor.offset + row * row_bytes
            raw = np.frombuffer(self._data[at : at + count * row_bytes], dtype=np.uint8).reshape(count, row_bytes)
            out[row : row + count].copy_(self._decode(raw, kind, name))
        return out.view(tensor.shape)

    def _decode(self, raw: np.ndarray[Any, Any], kind: Any, name: str) -> torch.Tensor:
        types = self._gguf.GGMLQuantizationType
        plain = {types.F32: torch.float32, types.F16: torch.float16, types.BF16: torch.bfloat16}
        if kind in plain:
            return torch.from_numpy(raw.copy()).view(plain[kind])
        try:
            return torch.from_numpy(self._gguf.quants.dequantize(raw, kind))
        except NotImplementedError as error:
            raise ConfigError(
                f"{self._path}: tensor {name!r} is encoded as {kind.name}, which the gguf package cannot decode",
                remedy="use another quantisation of the model, such as Q8_0 or F16",
            ) from error

    def _block(self, name: str) -> tuple[int, int]:
        """(elements, bytes) of one block of the tensor's encoding."""
        number = self.tensors[name].kind
        try:
            block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(number)]
        except (ValueError, KeyError):
            raise ConfigError(
                f"{self._path}: tensor {name!r} has encoding {number}, which the gguf package does not know",
                remedy="upgrade the gguf package",
            ) from None
        return int(block), int(size)


def hf_name(name: str) -> str:
    """llama.cpp's tensor name as HF's; an unknown one is left as it is, for the loader to complain about."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{kind}"
    return name


def halves_from_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order, (pair, member) per head, to the (member, pair) that rotating halves needs."""
    head_dim = tensor.shape[0] // num_heads
    grouped = tensor.view(num_heads, head_dim // 2, 2, -1)
    return grouped.transpose(1, 2).reshape(tensor.shape)


def _gguf_package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ConfigError("reading .gguf files needs the Python package 'gguf'", remedy="pip install gguf") from error
