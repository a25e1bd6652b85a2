"""How many branches a round may have: halved when a round is cut short, raised when it finishes."""

from __future__ import annotations

import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.base import Branch, DraftSequence
from ssd_ascend.speculation.branch_budget import BranchBudget
from ssd_ascend.speculation.fan_out import Guesses


def guesses_of(num_seqs: int, depths: int, per_depth: int) -> Guesses:
    """Branches as a fan-out lays them: by sequence, by depth, best first; the token says which one it is."""
    seqs = [DraftSequence(i, [1], 1, SamplingParams(), 0, frozenset()) for i in range(num_seqs)]
    branches = [Branch(seq, depth, depth) for seq in seqs for depth in range(depths) for _ in range(per_depth)]
    return Guesses(branches, torch.arange(len(branches)))


def test_what_fits_is_left_alone() -> None:
    guesses = guesses_of(2, 4, 3)
    assert BranchBudget().cut(guesses, 2) is guesses


def test_a_crowd_shares_and_keeps_the_best_of_every_depth() -> None:
    """96 branches for 32 sequences: 3 each, the first guess of depths 0, 1 and 2."""
    kept = BranchBudget().cut(guesses_of(32, 4, 3), 32)
    assert len(kept.branches) == 96
    assert [branch.depth for branch in kept.branches[:3]] == [0, 1, 2]
    assert kept.tokens[:3].tolist() == [0, 3, 6]
    assert kept.tokens[3:6].tolist() == [12, 15, 18]


def test_cut_rounds_halve_it_down_to_a_floor_and_whole_rounds_raise_it() -> None:
    budget = BranchBudget()
    crowd = guesses_of(8, 4, 6)
    sizes = []
    for _ in range(4):
        kept = budget.cut(crowd, 8)
        sizes.append(len(kept.branches))
        budget.saw_round(len(kept.branches), steps=1, wanted=5)
    assert sizes == [96, 48, 24, 24]
    for _ in range(10):
        budget.saw_round(24, steps=5, wanted=5)
    assert len(budget.cut(crowd, 8).branches) == 192


def test_every_sequence_keeps_one() -> None:
    budget = BranchBudget()
    for _ in range(5):
        budget.saw_round(96, steps=1, wanted=5)
    assert len(budget.cut(guesses_of(40, 2, 2), 40).branches) == 40
