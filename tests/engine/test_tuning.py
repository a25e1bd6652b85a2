"""Speculation can be bounded, switched off and on again while sequences run, and left out for one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.engine.engine import Engine
from tests.engine.harness import drive, greedy, make_engine, prompts_of, run, speculation, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("tiny"), "llama")


def collect(engine: Engine, tokens: dict[int, list[int]], steps: int) -> list[TokenDelta]:
    """Step, and keep what every sequence gained; returns the deltas."""
    deltas = [delta for _ in range(steps) for delta in engine.step()]
    for delta in deltas:
        tokens[delta.seq_id] += delta.token_ids
    return deltas


@pytest.mark.parametrize("when", ["sd", "ssd"])
@pytest.mark.parametrize("what", ["model", "eagle3", "ngram"])
def test_off_and_on_in_the_middle_changes_no_token(pair: Path, when: str, what: str) -> None:
    prompts = prompts_of([5, 9, 12])
    plain = run(pair, prompts, greedy(40)).tokens
    engine = make_engine(pair, speculation(pair, when, what))
    try:
        for i, prompt in enumerate(prompts):
            engine.submit(EngineRequest(id=i, prompt_token_ids=prompt, sampling=greedy(40)))
        tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        collect(engine, tokens, 4)
        engine.tune(0)
        drafted = engine.stats().speculation.drafted
        off = collect(engine, tokens, 4)
        assert engine.stats().speculation.drafted == drafted
        assert all(len(delta.token_ids) == 1 for delta in off)
        engine.tune(2)
        bounded = collect(engine, tokens, 3)
        assert all(len(delta.token_ids) <= 3 for delta in bounded)
        engine.tune(99)
        while engine.has_work:
            collect(engine, tokens, 1)
        assert [tokens[i] for i in range(len(prompts))] == plain
        if what == "model":
            assert engine.stats().speculation.drafted > drafted
    finally:
        engine.close()


@pytest.mark.parametrize("when", ["sd", "ssd"])
def test_one_of_several_goes_without(pair: Path, when: str) -> None:
    prompts = prompts_of([7, 7, 9])
    each = [greedy(24), greedy(24, speculation=False), greedy(24)]
    found = run(pair, prompts, each, speculation(pair, when))
    assert found.tokens == run(pair, prompts, greedy(24)).tokens
    last = [delta.stats for delta in found.last]
    assert [stats is not None and stats.drafted > 0 for stats in last] == [True, False, True]


def test_fewer_guesses_from_now_on(pair: Path) -> None:
    """No guess at all for three of the five accepted lengths: fewer hits, the same tokens."""
    prompts = prompts_of([5, 9, 12, 6])
    plain = run(pair, prompts, greedy(40)).tokens

    def hits(fan_out: list[int]) -> int:
        engine = make_engine(pair, speculation(pair, "ssd"))
        try:
            engine.tune(4, fan_out)
            found = drive(engine, prompts, greedy(40))
            assert found.tokens == plain
            return found.stats.speculation.hits
        finally:
            engine.close()

    assert 0 < hits([1, 0, 0, 0, 1]) < hits([])


def test_a_plain_engine_takes_it_calmly(pair: Path) -> None:
    engine = make_engine(pair)
    try:
        engine.tune(0)
        engine.submit(EngineRequest(id=0, prompt_token_ids=[5, 6], sampling=greedy(3)))
        tokens: dict[int, list[int]] = {0: []}
        while engine.has_work:
            collect(engine, tokens, 1)
        assert len(tokens[0]) == 3
    finally:
        engine.close()
