"""How an EAGLE-3 head is trained, and how its training text is written. Torch-free; made by the door `train`.

Every number that changes the result is in here, and a run's folder keeps a copy: a run is resumed with the same numbers
or not at all.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ssd_ascend.errors import ConfigError

Start = Literal["target", "random"]
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisConfig:
    """How the target writes its own conversations.

    `temperatures` of answers are drawn with `weights`; user turns are continued at `user_temperature`, for
    `max_user_tokens` at most. `fork_rate` is the chance that a token of an answer is replaced by another one the target
    finds likely (`fork_floor` nats below the best at most), after which it goes on by itself. `follow_ups` is the
    chance of a second round in a conversation.
    """

    conversations: int = 40_000
    max_length: int = 512
    slots: int = 4096
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.8, 1.0)
    weights: tuple[float, ...] = (0.5, 0.1, 0.15, 0.25)
    user_temperature: float = 0.9
    max_user_tokens: int = 96
    fork_rate: float = 0.04
    fork_floor: float = 3.0
    follow_ups: float = 0.25

    def __post_init__(self) -> None:
        _finite(self)
        _at_least(self, conversations=1, max_length=16, slots=1, max_user_tokens=1)
        _fractions(self, "fork_rate", "follow_ups")
        if len(self.temperatures) != len(self.weights) or not self.weights or min(self.temperatures) < 0.0:
            raise ConfigError(
                f"temperatures {list(self.temperatures)} and weights {list(self.weights)} do not pair up",
                remedy="give one weight to each temperature, none of them negative",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How the head learns.

    `unroll`: steps of training-time test, each on the head's own feature of the step before; step i weighs
    `step_decay` ** i. `fork_weight`: how much more a step weighs that comes after a forked token it has been fed.
    `overlap_weight`: share of the LK loss, -log of the probability mass that head and target have in common
    (what sampled acceptance is made of), in a loss that is otherwise the cross-entropy to the target's distribution.
    `muon_lr` moves the matrices of the layer, `lr` (AdamW) the norms and the vocabulary head. `draft_vocab` None means
    32000, or all of a smaller vocabulary.
    """

    steps: int = 3000
    batch_tokens: int = 32_768
    unroll: int = 7
    step_decay: float = 0.9
    fork_weight: float = 1.0
    overlap_weight: float = 0.0
    lr: float = 2e-3
    muon_lr: float = 0.02
    weight_decay: float = 0.01
    warmup: float = 0.02
    final_lr: float = 0.01
    clip: float = 1.0
    draft_vocab: int | None = None
    start: Start = "target"
    seed: int = 0
    held_out: float = 0.01
    evaluate_every: int = 250
    save_every: int = 500

    def __post_init__(self) -> None:
        _finite(self)
        _at_least(self, steps=1, batch_tokens=16, unroll=1, evaluate_every=1, save_every=1, seed=0)
        _at_least(self, fork_weight=0, weight_decay=0)
        if self.seed > _LARGEST_SEED:
            raise ConfigError(f"seed is {self.seed}", remedy=f"give at most {_LARGEST_SEED}")
        _fractions(self, "warmup", "final_lr", "overlap_weight", "held_out")
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ConfigError(f"draft_vocab is {self.draft_vocab}", remedy="give at least 1")
        for name in ("step_decay", "lr", "muon_lr", "clip"):
            if getattr(self, name) <= 0.0:
                raise ConfigError(f"{name} is {getattr(self, name)}", remedy="give a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that decides what a run makes.

    `data` and `openings` are files, None for none and for our own; `digest` is of what that file holds, so that a run
    is not taken up with another text.
    """

    target: str
    data: str | None = None
    openings: str | None = None
    digest: str | None = None
    synthesis: SynthesisConfig | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def to_dict(self) -> dict[str, Any]:
        """For the run's own folder; plain JSON values."""
        return asdict(self)

    def differences(self, kept: dict[str, Any]) -> list[str]:
        """In words, where this run differs from the one that a folder was begun with."""
        ours, theirs = _flat(_plain(self.to_dict())), _flat(kept)
        return [
            f"{name} was {theirs.get(name)!r}, now {ours.get(name)!r}"
            for name in dict.fromkeys([*theirs, *ours])
            if theirs.get(name) != ours.get(name)
        ]


def _plain(value: Any) -> Any:
    """As JSON would give it back: tuples are lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _finite(config: Any) -> None:
    for item in fields(config):
        value = getattr(config, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{item.name} is {value}", remedy="give a finite number")


def _at_least(config: Any, **floors: int) -> None:
    known = {item.name for item in fields(config)}
    for name, floor in floors.items():
        assert name in known
        if getattr(config, name) < floor:
            raise ConfigError(f"{name} is {getattr(config, name)}", remedy=f"give at least {floor}")


def _fractions(config: Any, *names: str) -> None:
    for name in names:
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ConfigError(f"{name} is {getattr(config, name)}", remedy="give a number from 0 to 1")
