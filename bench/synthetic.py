"""Models with random weights at the true shapes of public ones: for measuring speed where no checkpoint can be had.

`python -m bench.synthetic llama-3.1-8b DIR` writes an ordinary checkpoint (config.json and safetensors) any engine can
load; `build` makes the same model in memory on a device, in seconds. Speed does not depend on the weights' values.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.agreement import Weights
from bench.shapes import SHAPES, shape
from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.model import ModelConfig, model_config_from_hf
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.layers.slots import Slot, collect_slots, finish_loading
from ssd_ascend.runtime.load import CacheSize, make_cache, make_context
from ssd_ascend.runtime.model_runner import ModelRunner

_SHARD_BYTES = 4 << 30


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
        slot.load(weights.tensor(slot.name, slot.shape))
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
        save_file({slot.name: weights.tensor(slot.name, slot.shape).cpu() for slot in slots}, folder / name)
        index |= {slot.name: name for slot in slots}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1))
    (folder / "config.json").write_text(json.dumps(data, indent=1))


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="cut the model to this many layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--noise", type=float, help="follow a fixed chain of tokens, with this much noise (try 0.1 to 1)"
    )
    parser.add_argument("--device", default="cpu", help="torch device that draws the numbers")
    arguments = parser.parse_args()
    data = shape(arguments.name, layers=arguments.layers)
    if arguments.noise is not None:
        data["tie_word_embeddings"] = False
    write(data, arguments.folder, seed=arguments.seed, noise=arguments.noise, device=arguments.device)


if __name__ == "__main__":
    main()
