"""Models with random weights at the true shapes of public ones: for measuring speed where no checkpoint can be had.

`python -m bench.synthetic llama-3.1-8b DIR` writes an ordinary checkpoint (config.json and safetensors) any engine can
load; `build` makes the same model in memory on a device, in seconds. Speed does not depend on the weights' values.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.model import ModelConfig, model_config_from_hf
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.slots import Slot, collect_slots, finish_loading
from ssd_ascend.runtime.load import CacheSize, make_cache, make_context
from ssd_ascend.runtime.model_runner import ModelRunner

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SHARD_BYTES = 4 << 30


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    } | more


def _qwen3(hidden: int, layers: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    } | more


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
}


def shape(name: str, *, layers: int | None = None) -> dict[str, Any]:
    """The config of a public model, cut to `layers` layers when given."""
    config = dict(SHAPES[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    return config


def build(
    data: dict[str, Any],
    backend: Backend,
    device: torch.device,
    *,
    size: CacheSize,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | None = None,
    seed: int = 0,
    noise: float | None = None,
    capture_layers: tuple[int, ...] = (),
) -> tuple[ModelRunner, ModelConfig]:
    """A model of this config with weights as `Weights` makes them, ready to run on `device`."""
    config = model_config_from_hf(data, where="synthetic")
    block_size = block_size or backend.capabilities.block_sizes[0]
    ctx = make_context(config, backend, device, SingleRank(), dtype=dtype, block_size=block_size)
    family = ARCHITECTURES.get(config.family)
    model = family(config, ctx, capture_layers=capture_layers, max_positions=size.max_model_len)
    assert isinstance(model, torch.nn.Module)
    weights = Weights(config, device, dtype, seed=seed, noise=noise)
    for slot in collect_slots(model).values():
        slot.load(weights.draw(slot))
    finish_loading(model)
    kv = make_cache(backend, ctx, config.num_layers, block_size, size, len(capture_layers) * config.hidden_size)
    return ModelRunner(model, kv, ctx.attention, device), config


def write(
    data: dict[str, Any], folder: Path, *, seed: int = 0, noise: float | None = None, device: str = "cpu"
) -> None:
    """The same kind of model as a checkpoint in bfloat16: config.json, shards of 4 GB and their index.

    `device` is where torch draws the numbers: a device of its own kind draws faster, and other ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config_from_hf(data, where="synthetic")
    host = load_backend("cpu")
    # building allocates no weights; only the names and shapes of the slots are wanted
    ctx = make_context(config, host, host.device(0), SingleRank(), dtype=torch.bfloat16, block_size=16)
    model = ARCHITECTURES.get(config.family)(config, ctx, max_positions=16)
    assert isinstance(model, torch.nn.Module)
    weights = Weights(config, torch.device(device), torch.bfloat16, seed=seed, noise=noise)
    shards = list(_shards(list(collect_slots(model).values())))
    index: dict[str, str] = {}
    for number, slots in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({slot.name: weights.draw(slot).cpu() for slot in slots}, folder / name)
        index |= {slot.name: name for slot in slots}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1))
    (folder / "config.json").write_text(json.dumps(data, indent=1))


def successor(vocab_size: int) -> torch.Tensor:
    """int64 [V]: the token that follows each token in models with `noise`, the same in all of one vocabulary."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(20))


class Weights:
    """Weights by name, the same whatever the order they are asked for in.

    noise None: random, and so is what the model says. A number: the output layer makes the next token the `successor`
    of the current one, and the layers add noise of that size to it; so two models agree the more, the less of it they
    have. At 0 all agree always; how much they do at other sizes must be measured.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, seed: int, noise: float | None
    ) -> None:
        if noise is not None and config.tie_word_embeddings:
            raise ConfigError("noise needs an output layer of its own", remedy="set tie_word_embeddings to false")
        self._config, self._device, self._dtype, self._seed, self._noise = config, device, dtype, seed, noise

    def draw(self, slot: Slot) -> torch.Tensor:
        """One tensor. Norm weights are 1; a matrix's outputs are about as large as its inputs, so nothing overflows."""
        if len(slot.shape) == 1:
            return torch.ones(slot.shape, dtype=self._dtype, device=self._device)
        if self._noise is None:
            return self._normal(slot.name, slot.shape, 1 / math.sqrt(slot.shape[-1]))
        if slot.name.endswith("embed_tokens.weight"):
            return self._embedding(slot.shape)
        if slot.name.endswith("lm_head.weight"):
            head = torch.empty(slot.shape, dtype=self._dtype, device=self._device)
            head[successor(slot.shape[0]).to(self._device)] = self._embedding(slot.shape) * (16 / slot.shape[1])
            return head
        deviation = 1 / math.sqrt(slot.shape[-1])
        if slot.name.endswith(("o_proj.weight", "down_proj.weight")):
            # what the 2 * num_layers sub-layers add up to, against an embedding of norm sqrt(hidden_size)
            deviation *= self._noise * math.sqrt(self._config.hidden_size / (2 * self._config.num_layers))
        return self._normal(slot.name, slot.shape, deviation)

    def _embedding(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._normal("embedding", shape, 1.0)

    def _normal(self, name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed((self._seed << 32) + zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, deviation, generator=generator)


def _shards(slots: list[Slot]) -> Iterator[list[Slot]]:
    """Runs of slots of up to _SHARD_BYTES of bfloat16."""
    size: Callable[[Slot], int] = lambda slot: 2 * math.prod(slot.shape)  # noqa: E731
    shard: list[Slot] = []
    held = 0
    for slot in slots:
        if shard and held + size(slot) > _SHARD_BYTES:
            yield shard
            shard, held = [], 0
        shard.append(slot)
        held += size(slot)
    yield shard


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="cut the model to this many layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--noise", type=float, help="follow a fixed chain of tokens, with this much noise (try 0.1 to 1)"
    )
    parser.add_argument("--device", default="cpu", help="torch device that draws the numbers")
    arguments = parser.parse_args()
    write(
        shape(arguments.name, layers=arguments.layers), arguments.folder, seed=arguments.seed, device=arguments.device
    )


if __name__ == "__main__":
    main()
