"""Counting rounds: by hand on small tables, and against speculative sampling itself."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_ascend.training.evaluation import Answer, branches, by_depth, chains, report


def answer(stands: list[list[int]], *, ended: bool = True, foreseen: bool = True) -> Answer:
    array = np.array(stands, dtype=bool)
    return Answer(array, np.full_like(array, foreseen), ended)


def test_rounds_of_an_answer_by_hand() -> None:
    # column i: the chain fed with token i; rows: steps 1, 2, 3 would have given tokens i + 1, i + 2, i + 3
    one = answer([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0]])
    tally = chains([one], 3)
    # from 0: two stand, the third does not: tokens 1, 2, 3; from 3: 4, 5, 6 all stand, and the answer ends there
    assert (tally.rounds, tally.tokens) == (2, 6)
    assert tally.by_position == [1.0, 1.0, 0.5]
    assert chains([one], 1).tokens_per_round == pytest.approx(6 / 4)


def test_an_answer_that_ends_within_a_round_has_no_token_after_its_end() -> None:
    perfect = answer([[1] * 5, [1] * 4 + [0], [1] * 3 + [0] * 2])
    tally = chains([perfect], 3)
    assert (tally.rounds, tally.tokens) == (2, 5)


def test_branches_are_later_steps_and_fresh_drafts_first_steps() -> None:
    # one round from 0 that accepts one token; then the outcome's branch is steps 3 and 4 of column 0, the fresh draft
    # steps 1 and 2 of column 2
    stands = [[1, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    (row, total) = (
        branches([answer(stands)], 2, only_foreseen=False)[0],
        branches([answer(stands)], 2, only_foreseen=False)[-1],
    )
    assert (row.depth, row.outcomes) == (1, 1)
    assert (row.branch, row.fresh) == (2.0, 3.0)
    assert total.depth == -1
    assert branches([answer(stands, foreseen=False)], 2, only_foreseen=True) == []


def test_depth_leaves_out_chains_without_a_token_to_guess() -> None:
    assert by_depth([answer([[1, 1, 0, 1], [1, 0, 1, 0]])]) == [0.75, pytest.approx(2 / 3)]


def test_a_report_tells_ended_answers_apart() -> None:
    good, bad = answer([[1] * 6] * 3), answer([[0] * 6] * 3, ended=False)
    found = report({"greedy": [good, bad]}, (1, 3), 1)["greedy"]
    assert (found["answers"], found["ended"], found["tokens"]) == (2, 1, 12)
    assert found["tokens_per_round"]["1"] == {"all": pytest.approx(12 / 9, abs=1e-3), "ended": 2.0}


def test_coupling_counts_what_speculative_sampling_accepts() -> None:
    """Given the text, a draft was accepted with chance min(1, q / p): the same acceptance as drawing from q and
    judging with min(1, p / q), to within the noise of 200000 draws."""
    rng = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    text = rng.choice(3, 200_000, p=p)
    coupled = float((rng.random(200_000) < np.minimum(1.0, q / p)[text]).mean())
    drafts = rng.choice(3, 200_000, p=q)
    judged = float((rng.random(200_000) < np.minimum(1.0, p / q)[drafts]).mean())
    assert coupled == pytest.approx(np.minimum(p, q).sum(), abs=0.005)
    assert judged == pytest.approx(coupled, abs=0.01)
