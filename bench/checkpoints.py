"""Checkpoints of true size whose numbers are made when they are read: 65 GB of weights in seconds, and no disk.

`lay_out_model` and `lay_out_head` write a folder any loader of ours accepts: config.json, and a model.safetensors with
its header but a hole for its data, which takes no space. Where `hooked` is in effect, the weights come from
`bench/agreement.py`, drawn on the device that asks; without it they read as zeros. Only benchmarks do this.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.agreement import Agreement, HeadWeights, Weights
from bench.shapes import eagle3_shape
from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.model import model_config_from_hf
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.layers.slots import collect_slots
from ssd_ascend.runtime.load import make_context
from ssd_ascend.weights.safetensors import SafetensorsSource

RECIPE = "recipe.json"
_REPOSITORY = Path(__file__).resolve().parents[1]
_DTYPES = {torch.bfloat16: "BF16", torch.int64: "I64"}
Shapes = Mapping[str, tuple[int, ...]]


def lay_out_model(
    folder: Path,
    data: dict[str, Any],
    *,
    device_type: str,
    seed: int,
    noise: float,
    agreement: Agreement | None = None,
    core: int | None = None,
) -> Path:
    """A model of this shape that follows the chain of tokens, or, with an `agreement`, drafts for one that does.

    `device_type` is the kind of device that draws the numbers: different kinds draw different ones.
    """
    data = data | {"tie_word_embeddings": False}
    config = model_config_from_hf(data, where=str(folder))
    host = load_backend("cpu")
    # building allocates no weights; only the names and shapes of the slots are wanted
    ctx = make_context(config, host, host.device(0), SingleRank(), dtype=torch.bfloat16, block_size=16)
    model = ARCHITECTURES.get(config.family)(config, ctx, max_positions=16)
    assert isinstance(model, torch.nn.Module)
    shapes = {slot.name: slot.shape for slot in collect_slots(model).values()}
    recipe = {"device": device_type, "seed": seed, "noise": noise, "core": core}
    return _lay_out(folder, data, shapes, recipe | {"agreement": agreement and asdict(agreement)})


def lay_out_head(folder: Path, target: Path, *, agreement: Agreement, noise: float) -> Path:
    """An EAGLE-3 head for the laid-out model at `target`."""
    data = eagle3_shape(json.loads((target / "config.json").read_text()))
    recipe = {"target": str(target), "noise": noise, "agreement": asdict(agreement)}
    shapes = HeadWeights(data, _weights_of(target), agreement=agreement, noise=noise).shapes
    return _lay_out(folder, data, shapes, recipe)


def _lay_out(folder: Path, data: dict[str, Any], shapes: Shapes, recipe: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        dtype = torch.int64 if name == "d2t" else torch.bfloat16
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data must lie at a multiple of eight
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a hole: it has a size, and takes no space
    (folder / "config.json").write_text(json.dumps(data, indent=1))
    (folder / RECIPE).write_text(json.dumps(recipe, indent=1))
    return folder


def lay_out_draft(
    folder: Path, target: Path, data: dict[str, Any] | None, *, device_type: str, agreement: Agreement, noise: float
) -> Path:
    """A draft for the target laid out there: a model of this shape, or, with None, an EAGLE-3 head."""
    if data is None:
        return lay_out_head(folder, target, agreement=agreement, noise=noise)
    return lay_out_model(folder, data, device_type=device_type, seed=2, noise=noise, agreement=agreement)


def hooked(folder: Path) -> dict[str, str]:
    """The environment in which every Python process we start reads laid-out checkpoints: ranks and workers, too.

    Python imports a `sitecustomize` of its search path at start, wherever and by whomever a process is started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("from bench.checkpoints import install\n\ninstall()\n")
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [str(folder), str(_REPOSITORY), *filter(None, inherited.split(os.pathsep))]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """What `hooked` gave, for the worker processes and ranks that are started meanwhile."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = values["PYTHONPATH"]
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def install() -> None:
    """Let `SafetensorsSource` make the tensors of folders with a recipe, in this process."""
    original = SafetensorsSource.read
    if hasattr(original, "makes_tensors"):
        return

    @functools.wraps(original)
    def read(self: SafetensorsSource, name: str) -> torch.Tensor:
        made = _recipe(self.where)
        return original(self, name) if made is None else made.tensor(name, self.tensors[name].shape)

    read.makes_tensors = True  # type: ignore[attr-defined]
    SafetensorsSource.read = read  # type: ignore[method-assign]


@functools.cache
def _recipe(folder: str) -> Weights | HeadWeights | None:
    """Who makes the tensors of a folder; None for ordinary checkpoints."""
    path = Path(folder)
    if not (path / RECIPE).is_file():
        return None
    recipe = json.loads((path / RECIPE).read_text())
    if "target" not in recipe:
        return _weights_of(path)
    data = json.loads((path / "config.json").read_text())
    target = _weights_of(Path(recipe["target"]))
    return HeadWeights(data, target, agreement=Agreement(**recipe["agreement"]), noise=recipe["noise"])


def _weights_of(folder: Path) -> Weights:
    """The weights of a laid-out model, made on the current device of the kind that its recipe names."""
    recipe = json.loads((folder / RECIPE).read_text())
    agreement = recipe["agreement"] and Agreement(**recipe["agreement"])
    config = model_config_from_hf(json.loads((folder / "config.json").read_text()), where=str(folder))
    here = torch.accelerator.current_device_index() if recipe["device"] != "cpu" else None
    device = torch.device(recipe["device"]) if here is None else torch.device(recipe["device"], here)
    return Weights(
        config, device, torch.bfloat16, seed=recipe["seed"], noise=recipe["noise"], agreement=agreement,
        core=recipe["core"],
    )  # fmt: skip
