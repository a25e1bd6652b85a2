"""Which outcomes are prepared for: the geometry of fixed fans, and the adaptive one against brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.base import DraftSequence, Glue
from ssd_ascend.speculation.fan_out import AdaptiveFanOut, FixedFanOut, Guesses, make_fan_out

VOCAB = 11


def sequence(seq_id: int = 0) -> DraftSequence:
    return DraftSequence(seq_id, [1, 2, 3], 3, SamplingParams(), 0, frozenset())


def glue_of(num_rows: Sequence[int], *, seed: int = 0) -> Glue:
    scores = 2.0 * torch.randn(sum(num_rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    return Glue(scores, None, list(num_rows))


def triples(guesses: Guesses) -> list[tuple[int, int, int]]:
    """(sequence, depth, token) of every guess."""
    tokens = guesses.tokens.tolist()
    return [(branch.seq.id, branch.depth, token) for branch, token in zip(guesses.branches, tokens, strict=True)]


def test_what_a_configuration_asks_for() -> None:
    fixed = make_fan_out(3, 4)
    assert isinstance(fixed, FixedFanOut)
    assert (fixed.per_depth, fixed.width) == ((3,) * 5, 15)
    listed = make_fan_out((4, 0, 1), 2)
    assert isinstance(listed, FixedFanOut)
    assert (listed.per_depth, listed.width) == ((4, 0, 1), 5)
    assert isinstance(make_fan_out("auto", 4), AdaptiveFanOut)
    assert make_fan_out("auto", 4).width == 15


def test_a_fixed_fan_takes_the_best_of_every_row_but_never_the_draft_that_fell() -> None:
    seqs, sent = [sequence(0), sequence(1)], [(5, 6), (7,)]
    glue = glue_of([3, 2])
    scores = glue.scores.clone()
    guesses = FixedFanOut((3, 0, 2)).choose(seqs, sent, glue)
    expected = []
    for seq_id, depth, row, count, fell in [(0, 0, 0, 3, 5), (0, 2, 2, 2, None), (1, 0, 3, 3, 7), (1, 1, 4, 2, None)]:
        ranked = [t for t in scores[row].argsort(descending=True).tolist() if t != fell]
        expected += [(seq_id, depth, token) for token in ranked[:count]]
    assert triples(guesses) == expected
    assert [branch.glue_row for branch in guesses.branches] == [0, 0, 0, 2, 2, 3, 3, 3, 4, 4]


@pytest.mark.parametrize(("num_drafts", "counts"), [(0, [10]), (1, [4, 6]), (2, [4, 3, 3]), (3, [4, 3, 2, 1])])
def test_depths_that_a_short_speculation_lacks_go_to_its_last_one(num_drafts: int, counts: list[int]) -> None:
    """A declined row, too, gets the whole width: all of it on depth 0."""
    fan_out = FixedFanOut((4, 3, 2, 1))
    assert fan_out.counts(num_drafts) == counts
    guesses = fan_out.choose([sequence()], [tuple(range(num_drafts))], glue_of([num_drafts + 1]))
    assert [sum(b.depth == depth for b in guesses.branches) for depth in range(num_drafts + 1)] == counts


def test_a_tiny_vocabulary_has_no_more_to_guess() -> None:
    glue = Glue(torch.randn(2, 3), None, [2])
    guesses = FixedFanOut((5, 5)).choose([sequence()], [(1,)], glue)
    assert [b.depth for b in guesses.branches] == [0, 0, 1, 1]
    assert 1 not in guesses.tokens[:2].tolist()


@pytest.mark.parametrize("fan_out", [FixedFanOut((2, 2, 2)), AdaptiveFanOut(6)], ids=["fixed", "auto"])
def test_sequences_without_memory_get_no_guesses_and_move_nobody_elses(
    fan_out: FixedFanOut | AdaptiveFanOut,
) -> None:
    """Their drafts are under verification, but the drafter has no rows for them."""
    seqs, sent = [sequence(0), sequence(1), sequence(2)], [(5, 6), (7, 8), (9,)]
    packed = glue_of([0, 3, 0])
    alone = fan_out.choose([seqs[1]], [sent[1]], Glue(packed.scores.clone(), None, [3]))
    guesses = fan_out.choose(seqs, sent, packed)
    assert triples(guesses) == triples(alone)
    assert len(guesses.branches) == 6
    nobody = fan_out.choose(seqs, sent, Glue(torch.empty(0, 0), None, [0, 0, 0]))
    assert (nobody.branches, nobody.tokens.tolist()) == ([], [])
    for seq in seqs:
        fan_out.learn(seq.id, 1)
        fan_out.forget(seq.id)


def brute_force(glue: Glue, sent: Sequence[int], width: int, chance: Sequence[float]) -> set[tuple[int, int]]:
    """The likeliest (accepted, token) when draft j stands with chance[j]."""
    outcomes = []
    for depth in range(len(sent) + 1):
        reach = math.prod(chance[:depth]) * (1.0 - chance[depth] if depth < len(sent) else 1.0)
        law = torch.softmax(glue.scores[depth], -1).double()
        if depth < len(sent):
            law[sent[depth]] = 0.0
        law = law / law.sum()
        outcomes += [(reach * float(law[token]), depth, token) for token in range(VOCAB)]
    outcomes.sort(reverse=True)
    return {(depth, token) for _, depth, token in outcomes[:width]}


@pytest.mark.parametrize("seed", range(12))
def test_auto_takes_the_likeliest_outcomes_overall(seed: int) -> None:
    """Against enumeration of every outcome, with nothing learned: a draft stands as its bucket of confidence says."""
    sent = [(seed + 3 * j) % VOCAB for j in range(3)]
    glue = glue_of([4], seed=seed)
    confidence = [float(torch.softmax(glue.scores[j], -1)[token]) for j, token in enumerate(sent)]
    chance = [(min(int(10 * c), 9) + 0.5) / 10 for c in confidence]
    for width in (1, 5, 12):
        expected = brute_force(glue, sent, width, chance)
        guesses = AdaptiveFanOut(width).choose([sequence()], [sent], Glue(glue.scores.clone(), None, [4]))
        assert {(depth, token) for _, depth, token in triples(guesses)} == expected


def test_auto_learns_how_often_drafts_of_a_confidence_stand() -> None:
    """Confident drafts that always stand draw the width to the end; once they always fall, to the front."""
    fan_out = AdaptiveFanOut(6)
    scores = torch.zeros(3, VOCAB)
    scores[0, 4] = scores[1, 4] = 4.0  # q = 0.85

    def depths() -> list[int]:
        guesses = fan_out.choose([sequence()], [(4, 4)], Glue(scores.clone(), None, [3]))
        return [branch.depth for branch in guesses.branches]

    for _ in range(200):
        depths()
        fan_out.learn(0, 2)
    assert depths() == [2] * 6
    for _ in range(2000):
        depths()
        fan_out.learn(0, 0)
    assert depths() == [0] * 6


def test_what_was_never_chosen_for_teaches_nothing() -> None:
    taught, other = AdaptiveFanOut(4), AdaptiveFanOut(4)
    taught.learn(0, 2)
    taught.choose([sequence()], [(1, 2)], glue_of([3]))
    taught.forget(0)
    taught.learn(0, 0)
    glue = glue_of([3], seed=5)
    again = Glue(glue.scores.clone(), None, [3])
    assert triples(taught.choose([sequence()], [(1, 2)], glue)) == triples(other.choose([sequence()], [(1, 2)], again))
