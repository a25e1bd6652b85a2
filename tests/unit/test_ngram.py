"""Prompt lookup against a scan of the whole text."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.base import Branch, Chain, DraftSequence
from ssd_ascend.speculation.drafters.ngram import NgramDrafter
from ssd_ascend.speculation.fan_out import FixedFanOut
from ssd_ascend.speculation.guesser import Guesser
from ssd_ascend.speculation.ngram import MAX_NGRAM, MIN_NGRAM, NgramIndex
from ssd_ascend.speculation.outcome_odds import OutcomeOdds

tokens = st.lists(st.integers(0, 3), min_size=0, max_size=30)  # too short for the limit on places to matter


def scan(text: list[int], lookahead: int, tail: list[int]) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix of text + tail."""
    whole = text + tail
    for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        if len(whole) < n:
            continue
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == whole[-n:]:
                copied: list[int] = []
                for _ in range(lookahead):
                    copied.append((whole + copied)[end + len(copied)])
                return copied
    return []


@settings(max_examples=300, deadline=None)
@given(tokens, st.integers(1, 6), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 30))
def test_it_finds_what_a_scan_finds(text: list[int], lookahead: int, tail: list[int], cut: int) -> None:
    """Whether the text came at once or in two parts."""
    index = NgramIndex()
    index.update(text[:cut])
    index.update(text)
    assert index.propose(lookahead, tail) == scan(text, lookahead, tail)


@settings(max_examples=100, deadline=None)
@given(tokens, st.lists(st.integers(0, 3), max_size=3))
def test_continuations_count_what_followed(text: list[int], tail: list[int]) -> None:
    index = NgramIndex()
    index.update(text)
    counts: dict[int, int] = {}
    whole = text + tail
    for n in range(min(MAX_NGRAM, len(whole)), MIN_NGRAM - 1, -1):
        followers = [text[end] for end in range(n, len(text)) if text[end - n : end] == whole[-n:]]
        if followers:
            counts = {token: followers[-16:].count(token) for token in followers[-16:]}
            break
    assert index.continuations(tail) == counts


def test_a_text_that_is_another_starts_over() -> None:
    index = NgramIndex()
    index.update([1, 2, 3, 1, 2])
    assert index.propose(1) == [3]
    index.update([7, 8])
    assert index.propose(1) == []
    index.update([7, 8, 9, 7, 8])
    assert index.propose(2) == [9, 7]


def test_a_loop_is_continued_as_far_as_asked() -> None:
    """The latest occurrence lies so near to the end that what followed it ends before the lookahead does."""
    index = NgramIndex()
    index.update([1, 2, 3, 1, 2, 3, 1, 2, 3, 1])
    assert index.propose(7) == [2, 3, 1, 2, 3, 1, 2]
    assert index.propose(5, tail=(2, 3)) == [1, 2, 3, 1, 2]


def test_places_are_bounded() -> None:
    index = NgramIndex()
    index.update([5] * 5000)
    assert max(len(places) for places in index._places.values()) <= 16
    assert index.propose(3) == [5, 5, 5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), max_size=2))
def test_a_round_at_once_foresees_what_its_steps_do(text: list[int], drafts: list[int]) -> None:
    """With as many guesses as there are tokens, so that nothing is left out."""
    lookahead, vocab = 2, 5
    fan_out = FixedFanOut((vocab - 1,) * (lookahead + 1))
    drafter = NgramDrafter(num_target_tokens=vocab, device=torch.device("cpu"))
    seq = DraftSequence(1, text, 1, SamplingParams(), 0, frozenset())
    glue = drafter.glue([seq], [drafts], [None])
    steps = fan_out.choose([seq], [drafts], glue)
    chain = drafter.branch(steps.branches, steps.tokens, glue, [drafts] * len(steps.branches), 3, lambda: False)
    guesser = Guesser(fan_out.counts, OutcomeOdds(lookahead), lookahead, by_clock=False)
    at_once = drafter.foresee([seq], [drafts], [None], 3, guesser, meanwhile=lambda: None)
    expected = outcomes(steps.branches, steps.tokens.tolist(), chain)
    found = zip(at_once.outcomes, at_once.drafts, strict=True)
    assert {outcome[1:]: tokens for outcome, tokens in found if tokens} == expected


def outcomes(branches: list[Branch], guesses: list[int], chain: Chain) -> dict[tuple[int, int], list[int]]:
    """The drafts for every outcome that has some."""
    rows = zip(branches, guesses, chain.tokens.tolist(), chain.num_tokens, strict=True)
    return {(branch.depth, guess): tokens[:count] for branch, guess, tokens, count in rows if count}


def test_sequences_of_two_targets_may_have_one_id() -> None:
    """A speculator's targets each number their own from 0, and share its drafter."""
    drafter = NgramDrafter(num_target_tokens=64, device=torch.device("cpu"))
    one, other = (
        DraftSequence(0, text, 2, SamplingParams(temperature=0.0), 1, frozenset())
        for text in ([5, 6, 7, 8, 9, 1] * 3 + [5, 6, 7], [20, 21, 22] * 6 + [5, 6, 7])
    )
    assert drafter.chain([one], 3).tokens.tolist() == [[8, 9, 1]]
    assert drafter.chain([other], 3).num_tokens == [0]
    drafter.release(other)
    assert drafter.chain([one], 3).tokens.tolist() == [[8, 9, 1]]
