"""The loop: a batch, the unrolled loss, a step; now and then a look at held-out text and a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ssd_ascend.config.training import TrainingConfig
from ssd_ascend.errors import ConfigError
from ssd_ascend.log import fields, get_logger
from ssd_ascend.training.batches import endless, make_batch
from ssd_ascend.training.conversations import Conversations
from ssd_ascend.training.evaluation import by_depth, chains
from ssd_ascend.training.head import Weights
from ssd_ascend.training.judge import answers_of
from ssd_ascend.training.optimizer import Optimizer
from ssd_ascend.training.run_folder import RunFolder
from ssd_ascend.training.target import Source
from ssd_ascend.training.unroll import Lesson, unrolled_loss

log = get_logger(__name__)
_WATCHED_LOOKAHEAD = 5
_WATCHED_BATCHES = 2
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Material:
    """Text with its readings: to learn from, and held out."""

    train: Conversations
    train_source: Source
    held_out: Conversations
    held_out_source: Source | None
    ends: frozenset[int]


def train(
    weights: Weights,
    lesson: Lesson,
    material: Material,
    config: TrainingConfig,
    *,
    folder: RunFolder | None,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Train `weights` in place, from the folder's last checkpoint if it has one; returns the log, a record a look.

    A record: step, seconds, tokens a second (visits of the unrolled head), loss, `accuracy` by step while training, and
    on held-out text `held_out_by_depth` and `held_out_tokens_per_round` at lookahead 5.
    """
    optimizer = Optimizer(weights, config)
    step, records = _resume(weights, optimizer, folder)
    order = endless(material.train.lengths, config.batch_tokens, config.seed, skip=step)
    watch = _Watch(config, lesson.target.device, before=records[-1]["seconds"] if records else 0.0)
    while step < config.steps:
        batch = make_batch(material.train, next(order), config.batch_tokens, lesson.target.device)
        losses = unrolled_loss(weights, lesson, batch, material.train_source.fetch(batch), config)
        losses.loss.backward()
        optimizer.step(step)
        step += 1
        watch.saw(losses.loss.detach(), losses.right, losses.weight)
        progress(step, config.steps)
        looks = step % config.evaluate_every == 0 or step == config.steps
        saves = folder is not None and (step % config.save_every == 0 or step == config.steps)
        if looks or saves:
            _must_be_finite(weights, watch, step)
        if looks:
            records.append({"step": step, **watch.summary(), **_look(weights, lesson, material, config)})
            log.info(
                "%s", fields(**{name: value for name, value in records[-1].items() if not isinstance(value, list)})
            )
            watch.restart()
        if folder is not None and saves:
            folder.save(step, {**weights, **optimizer.state()}, records)
    return records


def _must_be_finite(weights: Weights, watch: _Watch, step: int) -> None:
    """ConfigError when training has diverged: neither a checkpoint nor a verdict is worth anything then."""
    if not watch.is_finite() or not all(bool(torch.isfinite(weight).all()) for weight in weights.values()):
        raise ConfigError(
            f"training diverged by step {step}: loss or weights are no finite numbers",
            remedy="lower --lr and --muon-lr, and take another --out; nothing of these steps was saved",
        )


def _resume(weights: Weights, optimizer: Optimizer, folder: RunFolder | None) -> tuple[int, list[dict[str, Any]]]:
    found = folder.load() if folder is not None else None
    if found is None:
        return 0, []
    step, tensors, records = found
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    optimizer.restore({name: tensor for name, tensor in tensors.items() if name not in weights})
    log.info("going on after step %d", step)
    return step, records


def _look(weights: Weights, lesson: Lesson, material: Material, config: TrainingConfig) -> dict[str, Any]:
    """How the head does on held-out text."""
    if material.held_out_source is None:
        return {}
    answers = answers_of(
        weights, lesson, material.held_out_source, material.held_out, batch_tokens=config.batch_tokens,
        depth=max(config.unroll, _WATCHED_LOOKAHEAD), sampled=False, ends=material.ends, at_most=_WATCHED_BATCHES,
    )  # fmt: skip
    return {
        "held_out_by_depth": [round(share, 4) for share in by_depth(answers)],
        "held_out_tokens_per_round": round(chains(answers, _WATCHED_LOOKAHEAD).tokens_per_round, 4),
    }


class _Watch:
    """Sums between two looks, kept on the device so that no step waits for the host."""

    def __init__(self, config: TrainingConfig, device: torch.device, *, before: float) -> None:
        self._tokens = config.batch_tokens
        self._began = time.monotonic() - before
        self._since = time.monotonic()
        self._sums: list[torch.Tensor] = []
        self._steps = 0

    def saw(self, *values: torch.Tensor) -> None:
        """Loss, right guesses by step, their weights."""
        self._sums = [a + b for a, b in zip(self._sums, values, strict=True)] if self._sums else list(values)
        self._steps += 1

    def is_finite(self) -> bool:
        """Whether every loss since the last look was a number; waits for the device."""
        return bool(torch.isfinite(self._sums[0]).all())

    def summary(self) -> dict[str, Any]:
        """What happened since the last one; waits for the device."""
        loss, right, weight = (value.cpu() for value in self._sums)
        now = time.monotonic()
        result = {
            "seconds": round(now - self._began, 2),
            "tokens_per_s": round(self._steps * self._tokens / (now - self._since)),
            "loss": round(float(loss) / self._steps, 5),
            "accuracy": [round(share, 4) for share in (right / weight.clamp_min(1e-9)).tolist()],
        }
        return result

    def restart(self) -> None:
        """Forget the sums, and the time that looking took."""
        self._sums, self._steps, self._since = [], 0, time.monotonic()
