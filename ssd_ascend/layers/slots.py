"""How layers say which checkpoint tensors they want. `weights.loader` collects the slots of a model and fills them.

A layer never sees a file, and the loader never sees a layer's insides: between them stands a list of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Slot:
    """One checkpoint tensor: its full name, its whole shape (before any split over ranks), and who takes it.

    `load` copies what it needs, casting to the serving dtype and device; the caller may drop the tensor at once.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]


@runtime_checkable
class TakesWeights(Protocol):
    """A layer with weights of its own."""

    def slots(self, path: str) -> Iterable[Slot]:
        """What it still needs; `path` is where it sits in its model. Nothing once it is loaded, so that a layer
        borrowed from another model is not asked for twice."""
        ...


@runtime_checkable
class FinishesLoading(Protocol):
    """A layer that is made from another one's weights."""

    def finish_loading(self) -> None:
        """Called once, when every slot of the model is filled."""
        ...


def collect_slots(model: nn.Module) -> dict[str, Slot]:
    """Every tensor `model` wants, by checkpoint name."""
    slots = (
        slot
        for path, module in model.named_modules()
        if isinstance(module, TakesWeights)
        for slot in module.slots(path)
    )
    return {slot.name: slot for slot in slots}


def finish_loading(model: nn.Module) -> None:
    """Tell every layer that waits for it that all weights are there."""
    for module in model.modules():
        if isinstance(module, FinishesLoading):
            module.finish_loading()
