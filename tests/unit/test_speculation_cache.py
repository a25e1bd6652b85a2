"""The speculation cache: what was prepared is found, once a generation, and its size is known."""

from __future__ import annotations

import torch

from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.speculation.base import Chain
from ssd_ascend.speculation.cache import Carried, SpeculationCache, drafts_of

VOCAB, WIDTH, DEPTH = 5, 6, 3


def chain(rows: int, *, first: int = 0, law: bool = True, hidden: bool = True) -> Chain:
    tokens = torch.arange(first, first + rows * DEPTH).view(rows, DEPTH)
    return Chain(
        tokens,
        [DEPTH] * rows,
        torch.randn(rows, DEPTH, VOCAB) if law else None,
        [law] * rows,
        torch.randn(rows, DEPTH, 4) if hidden else None,
    )


def fill(cache: SpeculationCache, filed: list[VerificationOutcome], made: Chain) -> None:
    cache.fill(filed, drafts_of(made), Carried.by(made))


def outcomes(seq_id: int, rows: int) -> list[VerificationOutcome]:
    return [VerificationOutcome(seq_id, row % 2, row) for row in range(rows)]


def test_a_hit_returns_its_own_row() -> None:
    cache, made = SpeculationCache(), chain(3)
    made.num_tokens[1] = 2
    made.has_law[2] = False
    fill(cache, outcomes(4, 3), made)
    assert len(cache) == 3
    first, second, third = (cache.look_up(outcome) for outcome in outcomes(4, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [first.tokens, second.tokens, third.tokens] == [[0, 1, 2], [3, 4], [6, 7, 8]]
    assert made.law is not None
    assert first.law is not None
    assert torch.equal(first.law, made.law[0])
    assert second.law is not None
    assert second.law.shape == (2, VOCAB)
    assert third.law is None
    assert second.hidden is not None
    assert second.hidden.shape == (2, 4)
    assert cache.look_up(VerificationOutcome(4, 2, 0)) is None
    assert cache.look_up(VerificationOutcome(5, 0, 0)) is None


def test_a_new_generation_replaces_the_old_one_of_its_sequence_alone() -> None:
    cache = SpeculationCache()
    fill(cache, outcomes(1, 4) + outcomes(2, 4), chain(8))
    fill(cache, outcomes(1, 2), chain(2, first=100))
    assert len(cache) == 6
    entry = cache.look_up(VerificationOutcome(1, 0, 0))
    assert entry is not None
    assert entry.tokens == [100, 101, 102]
    assert cache.look_up(VerificationOutcome(1, 0, 2)) is None
    assert cache.look_up(VerificationOutcome(2, 0, 2)) is not None


def test_a_guess_made_twice_keeps_the_first_and_one_without_tokens_is_none() -> None:
    cache, made = SpeculationCache(), chain(3)
    made.num_tokens[2] = 0
    fill(cache, [VerificationOutcome(1, 0, 7), VerificationOutcome(1, 0, 7), VerificationOutcome(1, 1, 7)], made)
    assert len(cache) == 1
    entry = cache.look_up(VerificationOutcome(1, 0, 7))
    assert entry is not None
    assert entry.tokens == [0, 1, 2]
    cache.drop([1])
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_bytes_are_those_of_what_is_held_and_dropping_returns_to_nothing() -> None:
    cache = SpeculationCache()
    fill(cache, outcomes(1, WIDTH), chain(WIDTH))
    one = cache.num_bytes
    assert one == WIDTH * (DEPTH * VOCAB * 4 + DEPTH * 4 * 4 + 8 * (DEPTH + 3))
    for seq_id in range(1, 50):
        fill(cache, outcomes(seq_id, WIDTH), chain(WIDTH))
        cache.drop([seq_id - 1])
    assert (len(cache), cache.num_bytes) == (WIDTH, one)
    cache.drop(range(60))
    assert (len(cache), cache.num_bytes, cache._of_sequence) == (0, 0, {})
