"""Muon for the matrices of the layer, AdamW for the rest, one schedule for both."""

from __future__ import annotations

import math

import torch

from ssd_ascend.config.training import TrainingConfig
from ssd_ascend.training.head import MATRICES, Weights


class Optimizer:
    """The two as one; its state is a flat table of tensors, so that a checkpoint needs no pickle."""

    def __init__(self, weights: Weights, config: TrainingConfig) -> None:
        self._config = config
        self._names = {"muon": list(MATRICES), "adam": [name for name in weights if name not in MATRICES]}
        self._weights = weights
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                [weights[name] for name in self._names["muon"]], lr=config.muon_lr, weight_decay=config.weight_decay
            ),
            "adam": torch.optim.AdamW(
                [weights[name] for name in self._names["adam"]],
                lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, foreach=True,
            ),
        }  # fmt: skip

    def step(self, number: int) -> torch.Tensor:
        """Apply the gradients of step `number` (from 0) and clear them; returns their norm."""
        scale = schedule(number, self._config)
        norm = torch.nn.utils.clip_grad_norm_(list(self._weights.values()), self._config.clip)
        for name, rate in (("muon", self._config.muon_lr), ("adam", self._config.lr)):
            optimizer = self._optimizers[name]
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, named `weight/entry`."""
        return {
            f"{name}/{entry}": value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            for kind, names in self._names.items()
            for name in names
            for entry, value in self._optimizers[kind].state[self._weights[name]].items()
        }

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take up a state that `state` gave."""
        for kind, names in self._names.items():
            for name in names:
                weight = self._weights[name]
                self._optimizers[kind].state[weight] = {
                    key.rpartition("/")[2]: value.to("cpu" if key.endswith("/step") else weight.device)
                    for key, value in state.items()
                    if key.rpartition("/")[0] == name
                }


def schedule(number: int, config: TrainingConfig) -> float:
    """Share of the full learning rate: a linear warm-up, then half a cosine down to `final_lr`."""
    warm = config.warmup * config.steps
    if number < warm:
        return (number + 1) / (warm + 1)
    progress = (number - warm) / max(1.0, config.steps - warm)
    return config.final_lr + (1.0 - config.final_lr) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
