"""What the planner is asked (`Wish`) and what it answers (`Plan`): who runs where, predicted times, why. Values only.

Times are milliseconds, memory is 10^9 bytes, devices are numbered from 0 in the physical order of the topology.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from ssd_ascend.config.speculation import FanOutSpec, SpeculationConfig
from ssd_ascend.errors import ConfigError

Mode = Literal["none", "sd", "ssd"]
"""Keys of the registry of speculators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asks for; None leaves the choice to the planner, or to the preset."""

    batch: int = 1
    context: int = 4096
    replicas: int = 1
    temperature: float = 0.0
    lookahead: int | None = None
    fan_out: FanOutSpec | None = None
    speculator: Mode | None = None
    tp: int | None = None
    speculators: int | None = None
    speculator_level: str | None = None
    acceptance: float | None = None
    hit_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "context", "replicas", "lookahead", "tp", "speculators"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}", remedy="give at least 1")
        if self.lookahead is not None or self.fan_out is not None:
            fan_out = 1 if self.fan_out is None else self.fan_out
            lookahead = len(fan_out) - 1 if isinstance(fan_out, tuple) else 1
            SpeculationConfig(lookahead=self.lookahead or lookahead, fan_out=fan_out)  # the limits of the engine
        for name in ("acceptance", "hit_rate"):
            if (value := getattr(self, name)) is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is {value}", remedy="give a chance, 0 to 1")
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}", remedy="give 0 (greedy) or more")

    @property
    def wants_speculators(self) -> bool:
        """Whether something is said of speculators on devices of their own."""
        return self.speculators is not None or self.speculator_level is not None


@dataclass(frozen=True, slots=True)
class Replica:
    """The devices of one copy of the target: its tensor-parallel ranks, its speculators, and what nobody may use.

    `spare` devices complete a package: both halves belong to one job.
    """

    index: int
    target: tuple[int, ...]
    speculators: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Devices in the order of the ranks of the replica's world: target first, speculators after."""
        return self.target + self.speculators

    @property
    def size(self) -> int:
        """How many devices it takes, spares included."""
        return len(self.ranks) + len(self.spare)


def in_words(mode: Mode, tp: int, speculators: int, level: str | None) -> str:
    """What runs, in a few words: "ssd, TP 4 + 2 speculators over node"."""
    helpers = f" + {speculators} speculator{'s' if speculators > 1 else ''} over {level}" if speculators else ""
    return f"{mode}, TP {tp}{helpers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One way to decode: a round gives every sequence `tokens_per_round` tokens on average; tokens/s of one replica."""

    mode: Mode
    round_ms: float
    tokens_per_round: float
    tokens_per_s: float
    on_miss: Literal["draft", "decline"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Parts of a round. `draft_ms` drafts on demand, `wide_draft_ms` prepares every branch of the speculation cache."""

    decode_ms: float
    verify_ms: float
    draft_ms: float | None = None
    wide_draft_ms: float | None = None
    message_ms: float | None = None
    message_down_bytes: int | None = None
    message_up_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one device holds; `capacity_gb` is what a plan may fill."""

    weights_gb: float
    kv_gb: float
    buffers_gb: float
    capacity_gb: float

    @property
    def total_gb(self) -> float:
        """All of it."""
        return self.weights_gb + self.kv_gb + self.buffers_gb

    @property
    def fits(self) -> bool:
        """Whether the device can hold it."""
        return self.total_gb <= self.capacity_gb


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule that fired, and what it said."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan not taken: the share of a replica's tokens/s it would lose (negative: faster, but with more devices)."""

    what: str
    tokens_per_s: float
    devices: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who runs where. `mode` is the speculator to run; `speeds` compares it with the other ways on the same target.

    `own_worker`: the target's process starts its only speculator itself, on the device behind its ranks, where it reads
    the target's features; else speculators are processes of their own, and are sent them.
    """

    topology: str
    preset: str
    wish: Wish
    mode: Mode
    tp: int
    lookahead: int
    speculator_level: str | None
    own_worker: bool
    replicas: tuple[Replica, ...]
    times: Times
    speeds: tuple[Speed, ...]
    target_memory: Memory
    speculator_memory: Memory | None
    reasons: tuple[Reason, ...]
    alternatives: tuple[Alternative, ...]
    calibrated: bool

    @property
    def speed(self) -> Speed:
        """The speed of the chosen mode."""
        return next(speed for speed in self.speeds if speed.mode == self.mode)

    @property
    def num_speculators(self) -> int:
        """Speculators of one replica."""
        return len(self.replicas[0].speculators)

    @property
    def devices_per_replica(self) -> int:
        """Devices that one replica takes, spares included."""
        return self.replicas[0].size

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        return dataclasses.asdict(self)
