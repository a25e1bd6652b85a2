"""How long a round takes: roofline plus overheads for a forward, alpha plus beta for a message. Microseconds.

A forward reads weights and KV cache (memory) and multiplies (compute), hides one behind the other as far as its kernels
do, and pays overheads per layer that neither explains. tests/unit/test_planner_measured.py holds the model against what
was measured; docs/topology.md tells how far off it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssd_ascend.config.plan import Speed, Times
from ssd_ascend.planner.rates import Rates
from ssd_ascend.planner.shapes import Shape

_INT = 8  # bytes of an integer on the wire
_HEADER_INTS = 5  # sequence id, accepted, recovery token, length, number of blocks
_KV_BLOCK = 16
_LAUNCH_US = 10.0  # outside a graph; 22 on the slow host of an H200 that was measured
_LAUNCHES_A_LAYER = 30  # of a sparse model, which is not captured: attention, norms, routing and the sum of answers
_LAUNCHES_AN_EXPERT = 3  # two matrices and the activation between them, expert by expert (`layers/moe.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the models: `width` is branches per sequence, `acceptance` and `hit_rate` are chances."""

    batch: int
    context: int
    lookahead: int
    width: int
    sampled: bool
    acceptance: float
    hit_rate: float

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a round whose drafts each stand with chance `acceptance`: 1 + a + ... + a^K."""
        return sum(self.acceptance**accepted for accepted in range(self.lookahead + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One or more forwards in turn: `busy_us` the memory or the arithmetic works, `idle_us` neither does."""

    busy_us: float
    idle_us: float

    @property
    def total_us(self) -> float:
        """From start to end."""
        return self.busy_us + self.idle_us

    def __add__(self, other: Forward) -> Forward:
        return Forward(busy_us=self.busy_us + other.busy_us, idle_us=self.idle_us + other.idle_us)

    def __mul__(self, times: float) -> Forward:
        return Forward(busy_us=self.busy_us * times, idle_us=self.idle_us * times)


def forward(shape: Shape, rates: Rates, *, rows: int, kv_bytes: float, tp: int = 1, step_us: float = 0.0) -> Forward:
    """One forward of `rows` tokens of a target on one of `tp` ranks, without what the ranks say to each other."""
    return _forward(shape, rates, rates.layer_us, rows=rows, kv_bytes=kv_bytes, tp=tp, step_us=step_us)


def _forward(
    shape: Shape, rates: Rates, layer_us: float, *, rows: int, kv_bytes: float, tp: int = 1, step_us: float
) -> Forward:
    stream = (shape.read_bytes(rows) / tp + kv_bytes) / rates.memory
    compute = 2 * shape.step_params * rows / tp / rates.compute
    busy = max(stream, compute) + (1.0 - rates.overlap) * min(stream, compute)
    if shape.experts is not None:
        layer_us += _LAUNCH_US * (_LAUNCHES_A_LAYER + _LAUNCHES_AN_EXPERT * shape.experts.distinct(rows))
    return Forward(busy_us=busy, idle_us=shape.layers * layer_us + step_us)


def draft_step(shape: Shape, rates: Rates, *, rows: int, kv_bytes: float = 0.0) -> Forward:
    """One forward of `rows` tokens of a draft."""
    return _forward(shape, rates, rates.draft_layer_us, rows=rows, kv_bytes=kv_bytes, step_us=rates.draft_step_us)


def draft_steps(shape: Shape, rates: Rates, *, steps: int, rows: int, kv_bytes: float = 0.0) -> Forward:
    """`steps` forwards of `rows` tokens one after the other, and what the draft does once a round."""
    step = draft_step(shape, rates, rows=rows, kv_bytes=kv_bytes)
    once = Forward(busy_us=shape.round_params * shape.dtype_bytes / rates.memory, idle_us=0.0)
    return step * steps + once


def shard(batch: int, speculators: int) -> int:
    """Sequences of the speculator that has most of them."""
    return -(-batch // speculators)


def side_by_side_us(one: Forward, other: Forward) -> float:
    """Two things at once on one device: they share its memory, but each works while the other pays overheads."""
    return one.total_us + other.total_us - min(one.idle_us, other.idle_us)


def told_ahead_us(verify_us: float, wide_us: float, message_us: float) -> float:
    """A round in which the target looks up what it was told before. What follows an outcome is asked for when that
    outcome is known and needed one round later, so the way there and back and both sides' work share two rounds. All
    drafts are meant: a target that asks before they are done has them cut short, and gets fewer for a shorter round."""
    return max(verify_us, wide_us, (verify_us + wide_us + message_us) / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One packed message each way for every speculator; the bytes are of all of them together. `hands_us` is what the
    target's host does to pass them through sockets."""

    us: float
    hands_us: float
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Target and draft on given devices under a given load. `crowd` copies share one host's memory (CPU)."""

    target: Shape
    draft: Shape | None
    rates: Rates
    load: Load
    tp: int
    tp_level: str
    crowd: int = 1

    def verify(self, rows_per_sequence: int) -> Forward:
        """The target over `rows_per_sequence` tokens of every sequence, collectives included."""
        rows = rows_per_sequence * self.load.batch
        kv = self.load.batch * self.load.context * self.target.kv_bytes_per_token / min(self.tp, self.target.kv_heads)
        host_us = self.rates.step_us + self.rates.sequence_us * self.load.batch
        step = forward(self.target, self.rates, rows=rows, kv_bytes=kv, tp=self.tp, step_us=host_us)
        crowd = self.crowd * (self.tp if self.rates.shares_host else 1)
        return Forward(busy_us=step.busy_us * crowd, idle_us=step.idle_us + self._collectives_us(rows))

    def _collectives_us(self, rows: int) -> float:
        if self.tp == 1:
            return 0.0
        hidden = rows * self.target.hidden * self.target.dtype_bytes
        logits = rows * self.target.vocab * self.target.dtype_bytes
        reduce_us = self.rates.all_reduce_us(hidden, self.tp, self.tp_level)
        return 2 * self.target.layers * reduce_us + self.rates.gather_us(logits / self.tp, self.tp_level, self.tp)

    def drafting(self, draft: Shape, sequences: int) -> Forward:
        """Drafting on demand for `sequences`: K steps of one row each."""
        kv = sequences * self.load.context * draft.kv_bytes_per_token
        steps = draft_steps(draft, self.rates, steps=self.load.lookahead, rows=sequences, kv_bytes=kv)
        return Forward(busy_us=steps.busy_us * self.crowd, idle_us=steps.idle_us)

    def branching(self, draft: Shape, sequences: int) -> Forward:
        """Preparing every branch for `sequences` after a hit: K steps of `width` rows each, the first with K + 1 of
        the glue beside them, and the host's work to choose, remember and tell them."""
        kv = sequences * self.load.context * draft.kv_bytes_per_token
        glue_rows = sequences * (self.load.lookahead + 1)
        rows = sequences * self.load.width
        first = draft_step(draft, self.rates, rows=glue_rows + rows, kv_bytes=kv)
        steps = first + draft_steps(draft, self.rates, steps=self.load.lookahead - 1, rows=rows, kv_bytes=kv)
        return Forward(busy_us=steps.busy_us * self.crowd, idle_us=steps.idle_us + self.rates.branch_us * rows)

    def message(self, draft: Shape, speculators: int, level: str) -> Message:
        """Outcomes and features down, drafts up (and their law when sampling), posted one speculator after another."""
        load, link, socket = self.load, self.rates.links[level], self.rates.socket
        blocks = -(-load.context // _KV_BLOCK)
        ints = _HEADER_INTS + blocks + load.lookahead + 1
        features = 0 if self.in_place(speculators, level) else draft.feature_bytes
        down = load.batch * (_INT * ints + features * (load.lookahead + 1))
        law = load.lookahead * draft.vocab * draft.dtype_bytes if load.sampled else 0
        up = load.batch * (_INT * (load.lookahead + 1) + law)
        wire = max((down + up) / speculators / min(link.pair, socket or link.pair), (down + up) / link.device)
        return Message(
            us=(1 + speculators) * (self.rates.message_us + link.latency_us) + wire,
            hands_us=(down + up) / socket if socket else 0.0,
            down_bytes=round(down),
            up_bytes=round(up),
        )

    def in_place(self, speculators: int, level: str) -> bool:
        """Whether the target's features are read where they are: by one speculator on its node, which the target's
        process starts itself, where devices read one another's memory."""
        return speculators == 1 and {level, self.tp_level} <= self.rates.peers

    def plain(self) -> Speed:
        """Decoding without drafts."""
        return self._speed("none", self.verify(1).total_us, 1.0)

    def in_turn(self, draft: Shape) -> Speed:
        """Classic speculative decoding: the draft runs on the target's first device, then the target verifies."""
        us = self.verify(self.load.lookahead + 1).total_us + self.drafting(draft, self.load.batch).total_us
        return self._speed("sd", us + self.rates.round_us, self.load.tokens_per_round)

    def hit_us(self, draft: Shape, speculators: int, level: str) -> float:
        """A round whose outcomes were all foreseen. Greedy drafts are told ahead (`told_ahead_us`); a law is asked for,
        and waited for, after the verdict."""
        verify, wide = self.verify(self.load.lookahead + 1), self.branching(draft, shard(self.load.batch, speculators))
        message = self.message(draft, speculators, level)
        if self.rates.shares_host:
            return side_by_side_us(verify, wide) + message.us + self.rates.round_us
        if self.load.sampled:
            return max(verify.total_us, wide.total_us) + message.us + self.rates.round_us
        return told_ahead_us(verify.total_us, wide.total_us, message.us) + self.rates.round_us

    def ahead(self, draft: Shape, speculators: int, level: str) -> Speed:
        """Speculating during verification. A row the cache did not foresee declines, or its drafting is waited for;
        the better of the two is told."""
        load = self.load
        us, tokens = self.hit_us(draft, speculators, level), load.tokens_per_round
        asked, waited = self._missed_us(draft, speculators, level)
        declines = self._speed("ssd", us + asked, load.hit_rate * tokens + 1.0 - load.hit_rate, on_miss="decline")
        waits = self._speed("ssd", us + waited, tokens, on_miss="draft")
        return max(declines, waits, key=lambda speed: speed.tokens_per_s)

    def _missed_us(self, draft: Shape, speculators: int, level: str) -> tuple[float, float]:
        """What rows that were not foreseen add to a round on average, if they decline and if their drafting is waited
        for. Where rounds on hits wait for no message and hide the host's hands behind the device, these do neither."""
        asked, waited = 0.0, self.drafting(draft, shard(self.load.batch, speculators)).total_us
        if not (self.load.sampled or self.rates.shares_host):
            message = self.message(draft, speculators, level)
            asked, waited = message.hands_us, waited + message.us
        chance = 1.0 - self.load.hit_rate**self.load.batch
        return chance * asked, chance * waited

    def _speed(
        self,
        mode: Literal["none", "sd", "ssd"],
        us: float,
        tokens: float,
        *,
        on_miss: Literal["draft", "decline"] | None = None,
    ) -> Speed:
        return Speed(
            mode=mode,
            round_ms=us / 1e3,
            tokens_per_round=tokens,
            tokens_per_s=self.load.batch * tokens * 1e6 / us,
            on_miss=on_miss,
        )

    def times(self, speculators: int, level: str | None) -> Times:
        """The parts of a round, for the plan's reader."""
        decode, verify = self.verify(1).total_us / 1e3, self.verify(self.load.lookahead + 1).total_us / 1e3
        if self.draft is None:
            return Times(decode_ms=decode, verify_ms=verify)
        drafting = self.drafting(self.draft, self.load.batch).total_us / 1e3
        if not speculators or level is None:
            return Times(decode_ms=decode, verify_ms=verify, draft_ms=drafting)
        message = self.message(self.draft, speculators, level)
        return Times(
            decode_ms=decode,
            verify_ms=verify,
            draft_ms=drafting,
            wide_draft_ms=self.branching(self.draft, shard(self.load.batch, speculators)).total_us / 1e3,
            message_ms=message.us / 1e3,
            message_down_bytes=message.down_bytes,
            message_up_bytes=message.up_bytes,
        )
