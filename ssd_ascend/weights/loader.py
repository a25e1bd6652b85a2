"""The way in: a path to a model directory or a `.gguf` becomes a config, then a model. Called by `engine.builder`.

Two steps, because attention must be made from the config before the model can be built:
`config = read_config(path)`, make a `BuildContext`, `load_model(path, ctx, ...)`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ssd_ascend.architectures.registry import ARCHITECTURES, CausalLM, check_family
from ssd_ascend.config.model import ModelConfig, family_of, model_config_from_hf, token_ids
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.weights.fill import Progress, fill
from ssd_ascend.weights.gguf import GgufSource, read_gguf_config
from ssd_ascend.weights.safetensors import SafetensorsSource
from ssd_ascend.weights.source import TensorSource

CONFIG = "config.json"


def read_config(path: str | Path) -> ModelConfig:
    """What the model at `path` is; reads no weights. ConfigError in one sentence when it cannot be served."""
    path = Path(path)
    if is_gguf(path):
        config = read_gguf_config(path)
        check_family(config.family, where=str(path))
        return config
    file = path / CONFIG
    data = read_json(file)
    check_family(family_of(data, where=str(file)), where=str(file))
    return with_generation_eos(model_config_from_hf(data, where=str(file)), path / "generation_config.json")


def open_source(path: str | Path, config: ModelConfig, ctx: BuildContext) -> TensorSource:
    """The tensors at `path`; use it in a `with` block."""
    path = Path(path)
    return GgufSource(path, config, ctx.dtype) if is_gguf(path) else SafetensorsSource(path)


def load_model(
    path: str | Path,
    ctx: BuildContext,
    *,
    max_positions: int,
    capture_layers: tuple[int, ...] = (),
    progress: Progress | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """Build the model at `path` and fill it with its weights, cast to `ctx.dtype`, on `ctx.device`.

    `capture_layers` as in `layers.decoder.Decoder`; `progress(bytes done, bytes in all)` is called after each tensor.
    Raises ConfigError naming file and tensor when anything is missing, superfluous or of the wrong shape.
    """
    config = read_config(path)
    model = ARCHITECTURES.get(config.family)(
        config, ctx, capture_layers=tuple(capture_layers), max_positions=max_positions
    )
    assert isinstance(model, nn.Module)
    with open_source(path, config, ctx) as source:
        # a tied model may come with a copy of its embedding as head
        fill(model, source, ignored=("lm_head.weight",) if config.tie_word_embeddings else (), progress=progress)
    return model, config


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file in llama.cpp's format; ConfigError when it does not exist at all."""
    if not path.exists():
        raise ConfigError(f"no such model: {path}", remedy="give a model directory or a .gguf file")
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{path} is neither a directory nor a .gguf file", remedy="give the directory it lies in")
    return path.is_file()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint; ConfigError naming the file otherwise."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no {file.name} in {file.parent}", remedy="give a complete model directory") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not readable JSON: {error}", remedy="download it again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is not a JSON object", remedy="download it again")
    return data


def with_generation_eos(config: ModelConfig, file: Path) -> ModelConfig:
    """Add the end-of-sequence ids of `generation_config.json`: chat models list more there than in `config.json`."""
    if not file.is_file():
        return config
    extra = token_ids(read_json(file).get("eos_token_id"))
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra))))
