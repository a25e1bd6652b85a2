"""How many drafts are worth it, against a clock that the test moves; and how deep branches go."""

from __future__ import annotations

import itertools
import random

import pytest

from ssd_ascend.speculation import lookahead
from ssd_ascend.speculation.branch_depth import FixedDepth, WindowDepth
from ssd_ascend.speculation.lookahead import LookaheadController


class Clock:
    """`time.perf_counter` as the test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(lookahead.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def play(
    controller: LookaheadController,
    clock: Clock,
    *,
    plain_s: float,
    draft_s: float,
    acceptance: float,
    steps: int,
    rows: int = 1,
) -> list[int]:
    """Steps of plain_s + k * draft_s, where every draft stands with the same chance; returns the k of each step."""
    rng, chosen = random.Random(0), []
    for _ in range(steps):
        wanted = controller.choose(list(range(rows)))
        k = max(wanted)
        clock.now += plain_s + k * draft_s
        controller.step_ended(rows, k)
        for seq_id, drafted in enumerate(wanted):
            stood = 0
            while stood < drafted and rng.random() < acceptance:
                stood += 1
            controller.saw(seq_id, drafted, stood)
        chosen.append(k)
    return chosen


def best_k(plain_s: float, draft_s: float, acceptance: float, most: int) -> int:
    """Of 0..most, the k with most tokens per second."""
    return max(range(most + 1), key=lambda k: sum(acceptance**i for i in range(k + 1)) / (plain_s + k * draft_s))


@pytest.mark.parametrize(
    ("draft_s", "acceptance"), [(0.01, 0.95), (0.05, 0.9), (0.1, 0.8), (0.1, 0.6), (0.3, 0.9)], ids=str
)
def test_auto_finds_the_k_that_pays_most(clock: Clock, draft_s: float, acceptance: float) -> None:
    """Near the optimum of known costs, and within 3 % of its rate."""
    controller = LookaheadController("auto", max_lookahead=8, may_stop=False)
    chosen = play(controller, clock, plain_s=1.0, draft_s=draft_s, acceptance=acceptance, steps=400)[-200:]
    best = best_k(1.0, draft_s, acceptance, 8)
    typical = sorted(chosen)[len(chosen) // 2]
    assert abs(typical - best) <= 2

    def rate(k: int) -> float:
        return sum(acceptance**i for i in range(k + 1)) / (1.0 + k * draft_s)

    assert rate(typical) > 0.97 * rate(best)


def test_it_stops_when_drafting_does_not_pay_and_tries_again_ever_more_rarely(clock: Clock) -> None:
    controller = LookaheadController(5, max_lookahead=5, may_stop=True)
    chosen = play(controller, clock, plain_s=1.0, draft_s=0.2, acceptance=0.02, steps=600)
    assert sum(k > 0 for k in chosen[:20]) >= 5
    late = chosen[100:]
    probes = [i for i, k in enumerate(late) if k]
    assert 3 <= len(probes) <= len(late) // 40
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert max(gaps) <= 64
    assert clock.now < 1.08 * len(chosen)


def test_it_comes_back_when_drafting_pays_again(clock: Clock) -> None:
    controller = LookaheadController(5, max_lookahead=5, may_stop=True)
    play(controller, clock, plain_s=1.0, draft_s=0.1, acceptance=0.0, steps=100)
    chosen = play(controller, clock, plain_s=1.0, draft_s=0.1, acceptance=0.99, steps=1000)
    assert chosen[-50:] == [5] * 50


def test_a_fixed_lookahead_of_a_costly_drafter_is_kept(clock: Clock) -> None:
    """Whoever asks for 3 gets 3: an order is not a guess."""
    controller = LookaheadController(3, max_lookahead=3, may_stop=False)
    assert set(play(controller, clock, plain_s=1.0, draft_s=9.0, acceptance=0.0, steps=50)) == {3}


def test_sequences_are_judged_one_by_one(clock: Clock) -> None:
    """A row whose drafts never stand does not stop its neighbour's."""
    controller = LookaheadController(4, max_lookahead=4, may_stop=True)
    wanted = [0, 0]
    for _ in range(200):
        wanted = controller.choose([0, 1])
        clock.now += 1.0 + 0.05 * max(wanted)
        controller.step_ended(2, max(wanted))
        controller.saw(0, wanted[0], wanted[0])
        controller.saw(1, wanted[1], 0)
    assert wanted == [4, 0]
    controller.forget([0, 1])
    assert controller._records == {}


def test_one_slow_step_moves_nothing(clock: Clock) -> None:
    """A prompt shared a step: the median does not care."""
    controller = LookaheadController(4, max_lookahead=4, may_stop=True)
    play(controller, clock, plain_s=1.0, draft_s=0.05, acceptance=0.9, steps=60)
    assert controller.choose([0]) == [4]
    clock.now += 50.0
    controller.step_ended(1, 4)
    assert controller.choose([0]) == [4]


# -- branches ----------------------------------------------------------------------------------------------------------


def measured(window_s: float, glue_s: float, step_s: float, most: int = 8) -> WindowDepth:
    depth = WindowDepth(most)
    for _ in range(9):
        depth.saw_window(window_s)
        depth.saw_glue(glue_s)
        depth.saw_branches(4, 4 * step_s)
    return depth


@pytest.mark.parametrize(
    ("window_s", "glue_s", "step_s", "depth"),
    [(10.0, 2.0, 2.0, 4), (10.0, 2.0, 1.9, 4), (10.0, 2.0, 2.1, 3), (100.0, 1.0, 1.0, 8), (1.0, 5.0, 1.0, 1)],
)
def test_branches_are_as_deep_as_the_window_hides(window_s: float, glue_s: float, step_s: float, depth: int) -> None:
    assert measured(window_s, glue_s, step_s).depth() == depth


def test_until_all_is_measured_branches_are_as_deep_as_may_be() -> None:
    depth: WindowDepth | FixedDepth = WindowDepth(6)
    assert depth.depth() == 6
    depth.saw_window(1.0)
    depth.saw_glue(0.1)
    assert depth.depth() == 6
    depth = FixedDepth(5)
    depth.saw_window(0.0)
    depth.saw_glue(9.0)
    depth.saw_branches(1, 9.0)
    assert depth.depth() == 5


def test_an_idle_hour_is_no_window() -> None:
    depth = measured(10.0, 2.0, 2.0)
    depth.saw_window(3600.0)
    assert depth.depth() == 4
