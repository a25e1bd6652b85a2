"""What is being planned (`Question`) and one possible answer (`Layout`). Values of the planner; `search` makes both."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_ascend.config.plan import Memory, Mode, Speed, Wish, in_words
from ssd_ascend.config.preset import Preset
from ssd_ascend.config.speculation import FanOutSpec
from ssd_ascend.config.topology import Topology
from ssd_ascend.planner.cost import Cost, Load, shard
from ssd_ascend.planner.machine import Machine
from ssd_ascend.planner.memory import speculator_memory, target_memory
from ssd_ascend.planner.placement import Placement, place
from ssd_ascend.planner.rates import Rates
from ssd_ascend.planner.shapes import Shape

ASSUMED_ACCEPTANCE = 0.6
ASSUMED_HIT_RATE = 0.7
"""For a preset that expects nothing; the plan says so."""
MOST_LOOKAHEAD = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run: a mode, its sizes, where it would sit, and how fast it is."""

    mode: Mode
    tp: int
    speculators: int
    lookahead: int
    placement: Placement
    speed: Speed
    cost: Cost

    @property
    def devices(self) -> int:
        """Devices that one replica takes, spares included."""
        return self.placement.replicas[0].size

    @property
    def own_worker(self) -> bool:
        """Whether a target starts its speculator itself; see `Plan.own_worker`."""
        level = self.placement.level
        return level is not None and self.cost.in_place(self.speculators, level)

    @property
    def what(self) -> str:
        """In words, for the list of alternatives."""
        return in_words(self.mode, self.tp, self.speculators, self.placement.level)


@dataclass(frozen=True, slots=True)
class Question:
    """Everything a layout is judged by."""

    topology: Topology
    preset: Preset
    preset_name: str
    wish: Wish
    machine: Machine
    target: Shape
    draft: Shape | None
    rates: Rates

    def load(self, lookahead: int) -> Load:
        """The load for a given lookahead, chances from the wish or else the preset."""
        wish, expected = self.wish, self.preset.expected
        acceptance, hit = ASSUMED_ACCEPTANCE, ASSUMED_HIT_RATE
        if expected:
            acceptance = expected.acceptance.value
            hit = (expected.hit_rate_sampled if wish.temperature > 0.0 else expected.hit_rate).value
        return Load(
            batch=wish.batch,
            context=wish.context,
            lookahead=lookahead,
            width=self._width(lookahead),
            sampled=wish.temperature > 0.0,
            acceptance=acceptance if wish.acceptance is None else wish.acceptance,
            hit_rate=hit if wish.hit_rate is None else wish.hit_rate,
        )

    def _width(self, lookahead: int) -> int:
        """Branches per sequence."""
        fan_out = self._fan_out
        if isinstance(fan_out, tuple):
            return sum(fan_out)
        return (lookahead + 1) * (3 if fan_out == "auto" else int(fan_out))

    @property
    def _fan_out(self) -> FanOutSpec:
        """As wished, or else as the preset has it."""
        if self.wish.fan_out is not None:
            return self.wish.fan_out
        return self.preset.speculation.fan_out if self.preset.speculation else 3

    @property
    def lookaheads(self) -> tuple[int, ...]:
        """The lookaheads to try: the one asked for, or all that the preset's fan-out allows."""
        if self.wish.lookahead is not None:
            return (self.wish.lookahead,)
        speculation = self.preset.speculation
        if speculation is None:
            return (1,)
        if isinstance(self._fan_out, tuple):
            return (len(self._fan_out) - 1,)
        return tuple(range(1, max(MOST_LOOKAHEAD, speculation.max_lookahead) + 1))

    @property
    def usual_lookahead(self) -> int:
        """The lookahead to judge messages by before one is chosen."""
        if self.wish.lookahead is not None or self.preset.speculation is None:
            return self.wish.lookahead or 1
        return max(1, self.preset.speculation.max_lookahead)

    def cost(self, tp: int, lookahead: int) -> Cost:
        """The cost model for one degree of tensor parallelism."""
        return Cost(
            target=self.target,
            draft=self.draft,
            rates=self.rates,
            load=self.load(lookahead),
            tp=tp,
            tp_level=self.machine.level_holding(tp),
            crowd=self.wish.replicas if self.topology.device.shares_host else 1,
        )

    def memories(self, tp: int, speculators: int, mode: Mode) -> tuple[Memory, Memory | None]:
        """What a target rank and a speculator of this layout hold."""
        wish = self.wish
        processes = wish.replicas * (tp + speculators)
        target = target_memory(
            self.topology,
            self.target,
            tp=tp,
            batch=wish.batch,
            context=wish.context,
            beside=self.draft if mode == "sd" else None,
            speculators=speculators,
            processes=processes,
        )
        if not speculators or self.draft is None:
            return target, None
        sequences = shard(wish.batch, speculators)
        return target, speculator_memory(
            self.topology, self.draft, sequences=sequences, context=wish.context, processes=processes
        )

    def place(self, tp: int, speculators: int) -> Placement | None:
        """Where every replica of this layout would sit, or None."""
        wish = self.wish
        return place(
            self.machine,
            self.topology.placement,
            tp=tp,
            speculators=speculators,
            replicas=wish.replicas,
            at_level=wish.speculator_level if speculators else None,
        )
