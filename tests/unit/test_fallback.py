"""What a row gets that was not foreseen: the depth that measured times and acceptance justify."""

from __future__ import annotations

import pytest

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.base import DraftSequence
from ssd_ascend.speculation.fallback import FallbackPolicy, OnMiss


def measured(*, step_s: float, verify_s: float, stood: int = 0, fell: int = 0) -> FallbackPolicy:
    """An `auto` policy that has seen these times, and drafts that stood and fell."""
    policy = FallbackPolicy("auto")
    for _ in range(9):
        policy.saw_chain(2, 2 * step_s)
        policy.saw_verification(verify_s)
    for _ in range(stood):
        policy.saw_outcome(1, 1)
    for _ in range(fell):
        policy.saw_outcome(1, 0)
    return policy


@pytest.mark.parametrize(
    ("on_miss", "depth", "ngram"), [("draft", 5, False), ("ngram", 0, True), ("decline", 0, False)], ids=str
)
def test_what_is_ordered_is_done(on_miss: OnMiss, depth: int, ngram: bool) -> None:
    policy = FallbackPolicy(on_miss)
    policy.saw_chain(1, 100.0)
    policy.saw_verification(0.001)
    assert policy.depth(num_missing=1, num_rows=8, lookahead=5) == depth
    assert policy.uses_ngram is ngram


def test_auto_begins_with_a_short_chain_to_learn_what_it_costs() -> None:
    policy = FallbackPolicy("auto")
    assert policy.depth(num_missing=1, num_rows=1, lookahead=5) == 2
    assert policy.depth(num_missing=1, num_rows=1, lookahead=1) == 1


@pytest.mark.parametrize("step_s", [0.01, 0.05, 0.1, 0.2, 0.31, 0.5])
@pytest.mark.parametrize(("num_missing", "num_rows"), [(1, 1), (1, 4), (3, 4), (8, 8)])
def test_auto_drafts_while_a_token_brings_more_than_its_wait_costs(
    step_s: float, num_missing: int, num_rows: int
) -> None:
    """The formula by hand, from what a fresh policy assumes: a = 0.6, two tokens a round."""
    policy = measured(step_s=step_s, verify_s=1.0)
    worth = [i for i in range(1, 7) if num_missing * 0.6**i > num_rows * 2.0 * step_s / 1.0]
    assert policy.depth(num_missing=num_missing, num_rows=num_rows, lookahead=6) == len(worth)


def test_auto_follows_acceptance() -> None:
    times = {"step_s": 0.05, "verify_s": 1.0}
    depths = [
        policy.depth(num_missing=1, num_rows=1, lookahead=6)
        for policy in (measured(**times, fell=60), measured(**times), measured(**times, stood=60))
    ]
    assert depths == sorted(depths)
    assert (depths[0], depths[-1]) == (0, 6)


def test_a_declined_row_says_nothing_of_drafts() -> None:
    """Else a spell without drafts would look like drafts that fall, and end drafting for good."""
    policy = measured(step_s=0.05, verify_s=1.0)
    before = policy.depth(num_missing=1, num_rows=1, lookahead=6)
    for _ in range(100):
        policy.saw_outcome(0, 0)
    assert policy.depth(num_missing=1, num_rows=1, lookahead=6) >= before > 0


def test_an_idle_hour_is_no_verification() -> None:
    policy = measured(step_s=0.5, verify_s=1.0)
    assert policy.depth(num_missing=1, num_rows=1, lookahead=6) == 0
    policy.saw_verification(3600.0)
    assert policy.depth(num_missing=1, num_rows=1, lookahead=6) == 0


def test_ngrams_are_kept_per_sequence_until_forgotten() -> None:
    policy = FallbackPolicy("ngram")
    seqs = [
        DraftSequence(7, [1, 2, 3, 4, 1, 2, 3], 7, SamplingParams(), 0, frozenset()),
        DraftSequence(8, [1, 2, 3, 4, 5, 6], 6, SamplingParams(), 0, frozenset()),
    ]
    assert policy.ngrams(seqs, 2) == [[4, 1], []]
    seqs[1].token_ids += [4, 5]
    assert policy.ngrams(seqs, 3) == [[4, 1, 2], [6, 4, 5]]
    policy.forget([7, 8, 9])
    assert policy._indexes == {}


@pytest.mark.parametrize(("step_s", "num_missing", "num_rows", "depth"),
                         [(0.05, 1, 1, 6), (0.05, 1, 8, 0), (0.05, 8, 8, 6), (0.2, 1, 1, 0)])  # fmt: skip
def test_chains_that_come_whole_are_drafted_where_all_of_one_is_worth_it(
    step_s: float, num_missing: int, num_rows: int, depth: int
) -> None:
    """By hand: six drafts bring 1.43 tokens a missing row at a = 0.6, and cost 0.6 or 2.4 a row."""
    policy = measured(step_s=step_s, verify_s=1.0)
    assert policy.depth(num_missing=num_missing, num_rows=num_rows, lookahead=6, whole=True) == depth
    assert FallbackPolicy("auto").depth(num_missing=1, num_rows=1, lookahead=6, whole=True) == 6


@pytest.mark.parametrize(("verify_s", "step_s", "expected"), [(0.005, 0.00025, 2), (0.005, 0.01, 9), (0.5, 0.1, 1)])
def test_from_how_many_missing_rows_on_an_answer_is_worth_waiting_for(
    verify_s: float, step_s: float, expected: int
) -> None:
    """Of eight rows, six drafts each: by the same formula; and where verification is long, asking is cheap."""
    policy = measured(step_s=step_s, verify_s=verify_s)
    worth_from = policy.worth_from(num_rows=8, lookahead=6, whole=False)
    assert worth_from == expected
    if expected > 1:
        depths = [policy.depth(num_missing=n, num_rows=8, lookahead=6) for n in range(1, 9)]
        assert [depth > 0 for depth in depths] == [n >= expected for n in range(1, 9)]


def test_who_never_drafts_on_demand_is_never_worth_waiting_for() -> None:
    assert FallbackPolicy("decline").worth_from(num_rows=4, lookahead=6, whole=False) == 5
    assert FallbackPolicy("draft").worth_from(num_rows=4, lookahead=6, whole=False) == 1


def test_text_that_does_not_repeat_itself_is_seldom_asked_for_ngrams() -> None:
    """Beside a long verification the target waits for them, as long as some are found."""
    policy = measured(step_s=1.0, verify_s=0.02)
    asked = {"num_rows": 4, "lookahead": 5, "whole": True}
    assert policy.worth_from(**asked) == 1
    fresh = DraftSequence(1, list(range(50)), 9, SamplingParams(), 0, frozenset())
    for _ in range(30):
        policy.ngrams([fresh], 4)
    times = [policy.worth_from(**asked) for _ in range(128)]
    assert set(times) == {1, 5}
    assert times.count(1) == 2
    fresh.token_ids += list(range(20))
    for _ in range(5):
        policy.ngrams([fresh], 4)
    assert policy.worth_from(**asked) == 1
