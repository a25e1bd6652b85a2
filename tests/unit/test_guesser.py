"""Which outcomes a worker prepares for, and how many: by what came true, and by what rounds of each width take."""

from __future__ import annotations

import random

import pytest

from ssd_ascend.speculation.drafters.captured_ahead import narrowed, widths_ahead
from ssd_ascend.speculation.drafters.captured_forks import widths_of
from ssd_ascend.speculation.fan_out import FixedFanOut
from ssd_ascend.speculation.guesser import Guesser
from ssd_ascend.speculation.outcome_odds import Judged, OutcomeOdds

K = 4
COUNTS = FixedFanOut((3,) * (K + 1)).counts


def learnt(*, stands: float, second: float, rounds: int = 3000) -> OutcomeOdds:
    """Of drafts that stand with this chance, and otherwise are replaced by the draft's next choice with that one."""
    odds, draw = OutcomeOdds(K), random.Random(1)
    for _ in range(rounds):
        accepted = 0
        while accepted < K and draw.random() < stands:
            accepted += 1
        if accepted == K:
            rank = 0 if draw.random() < stands else 1 if draw.random() < second else None
        else:
            rank = 0 if draw.random() < second else None
        odds.saw(Judged(accepted, K, rank, 3))
    return odds


def test_chances_are_those_that_were_seen() -> None:
    ranked = {pick: chance for chance, pick in learnt(stands=0.8, second=0.9).ranked(COUNTS(K), K)}
    assert ranked[0, 0] == pytest.approx(0.2 * 0.9, abs=0.03)
    assert ranked[2, 0] == pytest.approx(0.8**2 * 0.2 * 0.9, abs=0.03)
    assert ranked[K, 0] == pytest.approx(0.8**K * 0.8, abs=0.03)
    assert ranked[K, 1] == pytest.approx(0.8**K * 0.2 * 0.9, abs=0.03)
    assert ranked[1, 1] < 0.01
    assert sum(ranked.values()) <= 1.0


def test_guesses_that_never_come_true_go_last() -> None:
    """Six guesses: the first of every depth, and the second behind the last draft, not beside an earlier one."""
    guesser = Guesser(COUNTS, learnt(stands=0.8, second=0.9), K, by_clock=False)
    assert guesser.picks(K, 9, 6) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1)]
    assert guesser.picks(K, 9, 3) == [(0, 0), (1, 0), (4, 0)]


def test_all_that_is_asked_for_is_prepared_where_there_is_room() -> None:
    guesser = Guesser(COUNTS, OutcomeOdds(K), K, by_clock=False)
    assert guesser.picks(K, 9, 15) == [(depth, rank) for depth in range(K + 1) for rank in range(3)]
    assert guesser.picks(1, 2, 15) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert guesser.picks(0, 64, 15) == [(0, rank) for rank in range(15)]


def test_a_kind_of_text_that_changed_is_learnt_anew() -> None:
    odds = learnt(stands=0.9, second=0.9, rounds=20000)
    for _ in range(6000):
        odds.saw(Judged(0, K, None, 3))
    assert odds.reach(1)[1] < 0.4


def rounds(guesser: Guesser, widths: list[int], work_s: dict[int, float], target_s: float, count: int) -> list[int]:
    """Widths chosen in rounds where the worker takes work_s, and then waits while the target is still busy."""
    chosen = []
    for _ in range(count):
        width = guesser.width(widths, ahead=False)
        chosen.append(width)
        guesser.saw_round(max(0.0, target_s - work_s[width]), work_s[width], usual=True)
    return chosen


@pytest.mark.parametrize(
    ("work_s", "target_s", "best"),
    [
        ({16: 4.0, 8: 3.0, 4: 2.5}, 5.0, 16),  # all fit: the most hits
        ({16: 9.0, 8: 5.0, 4: 4.9}, 5.0, 8),  # the widest would make the target wait, the narrowest gains nothing
        ({16: 30.0, 8: 20.0, 4: 6.0}, 5.0, 4),
    ],
)
def test_the_width_with_most_tokens_a_second_is_taken(work_s: dict[int, float], target_s: float, best: int) -> None:
    guesser = Guesser(COUNTS, learnt(stands=0.8, second=0.5), K, by_clock=True)
    chosen = rounds(guesser, [16, 8, 4], work_s, target_s, 60)
    assert set(chosen[25:]) == {best}
    assert chosen[0] == 16


def test_without_a_clock_the_widest_is_taken() -> None:
    guesser = Guesser(COUNTS, OutcomeOdds(K), K, by_clock=False)
    assert set(rounds(guesser, [16, 8, 4], {16: 90.0, 8: 1.0, 4: 1.0}, 1.0, 30)) == {16}


def test_a_width_that_was_slow_once_is_tried_again() -> None:
    """A worker shares its device for a while; long after, it has the device to itself."""
    guesser = Guesser(COUNTS, learnt(stands=0.8, second=0.5), K, by_clock=True)
    assert rounds(guesser, [16, 8], {16: 50.0, 8: 5.0}, 5.0, 30)[-1] == 8
    chosen = rounds(guesser, [16, 8], {16: 5.0, 8: 5.0}, 6.0, 2200)
    assert 16 not in chosen[:1900]
    assert set(chosen[-50:]) == {16}


def test_rounds_in_which_somebody_waited_for_drafts_do_not_count() -> None:
    guesser = Guesser(COUNTS, learnt(stands=0.8, second=0.5), K, by_clock=True)
    for _ in range(9):
        assert guesser.width([16, 8], ahead=False) == 16
        guesser.saw_round(0.0, 99.0, usual=False)
    assert guesser.width([16, 8], ahead=False) == 16


def test_rounds_count_that_follow_one_of_their_own_width() -> None:
    """A round's guesses are still felt in the next; kinds of rounds that take turns say nothing of each other."""
    guesser = Guesser(COUNTS, learnt(stands=0.8, second=0.5), K, by_clock=True)
    for _ in range(20):
        for ahead in (False, True):
            assert guesser.width([16, 8], ahead=ahead) == 16
            guesser.saw_round(0.0, 99.0, usual=True)


def test_an_idle_target_says_nothing() -> None:
    guesser = Guesser(COUNTS, learnt(stands=0.8, second=0.5), K, by_clock=True)
    assert set(rounds(guesser, [16, 8], {16: 1.0, 8: 1.0}, 100.0, 30)) == {16}


def test_graphs_are_made_for_what_a_batch_has_room_for() -> None:
    assert widths_of(1, 21, 256) == [21]
    assert widths_of(4, 21, 256) == [21, 10]
    assert widths_of(16, 21, 256) == [16, 8, 4]
    assert widths_of(64, 21, 256) == [4, 2]
    assert widths_of(512, 21, 256) == [1]


def test_narrow_rounds_ahead_keep_guesses_behind_the_last_draft() -> None:
    assert narrowed([3, 3, 3, 3, 3, 3], 18) == [3, 3, 3, 3, 3, 3]
    assert narrowed([3, 3, 3, 3, 3, 3], 8) == [1, 1, 1, 1, 1, 3]
    assert narrowed([3, 3, 3, 3, 3, 3], 4) == [1, 1, 0, 0, 0, 2]
    assert narrowed([1, 0, 2, 5], 8) == [1, 0, 2, 3]
    assert widths_ahead(16, [3] * 6) == [8, 4]
    assert widths_ahead(2, [3] * 6) == [18]
    assert widths_ahead(1, [3] * 6) == [18, 13]
    assert sum(narrowed([3] * 6, 13)[:-1]) + 6 == 16  # what its first forward holds
