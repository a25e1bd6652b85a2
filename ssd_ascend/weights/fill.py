"""Fills a model's slots from a checkpoint, strictly: whatever does not match is an error, before any read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.slots import Slot, collect_slots, finish_loading
from ssd_ascend.weights.source import TensorInfo, TensorSource

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor; the doors draw a bar from it."""

_SHOWN = 3


def fill(
    model: nn.Module, source: TensorSource, *, ignored: Collection[str] = (), progress: Progress | None = None
) -> None:
    """Load every tensor of `source` into `model`, one at a time. `ignored` names may be there without a taker."""
    slots = collect_slots(model)
    tensors = {name: info for name, info in source.tensors.items() if name in slots or not _ignorable(name, ignored)}
    _check_names(slots, tensors, source.where)
    _check_shapes(slots, tensors)
    total, done = sum(info.num_bytes for info in tensors.values()), 0
    for name, info in tensors.items():
        slots[name].load(source.read(name))
        done += info.num_bytes
        if progress is not None:
            progress(done, total)
    finish_loading(model)


def _ignorable(name: str, ignored: Collection[str]) -> bool:
    """Old exporters saved the rotary frequencies, which we compute."""
    return name in ignored or name.endswith(".rotary_emb.inv_freq")


def _check_names(slots: Mapping[str, Slot], tensors: Mapping[str, TensorInfo], where: str) -> None:
    missing = [name for name in slots if name not in tensors]
    if missing:
        raise ConfigError(
            f"{where} lacks {_listed(missing)}", remedy="check that its config belongs to it and that it is complete"
        )
    unexpected = [name for name in tensors if name not in slots]
    if unexpected:
        raise ConfigError(
            f"{tensors[unexpected[0]].file} holds {_listed(unexpected)}, which this model has no use for",
            remedy="check that its config belongs to it (biases, layers, family)",
        )


def _check_shapes(slots: Mapping[str, Slot], tensors: Mapping[str, TensorInfo]) -> None:
    for name, info in tensors.items():
        if info.shape != slots[name].shape:
            raise ConfigError(
                f"{info.file}: tensor {name!r} has shape {list(info.shape)}, expected {list(slots[name].shape)}",
                remedy="check that its config belongs to it",
            )
        if not info.dtype.is_floating_point:
            raise ConfigError(
                f"{info.file}: tensor {name!r} holds {str(info.dtype).removeprefix('torch.')}: quantised weights are "
                "not supported in this format",
                remedy="use the unquantised checkpoint, or a .gguf file",
            )


def _listed(names: list[str]) -> str:
    """The first names of a list that may be long."""
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    rest = len(names) - _SHOWN
    return f"tensor {shown}" if len(names) == 1 else f"{len(names)} tensors: {shown}{', ...' if rest > 0 else ''}"
