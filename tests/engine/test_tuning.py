"""Speculation can be bounded, switched off and on again while sequences run, and left out for one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.hits_ahead import HitsAhead
from tests.engine.capturing import capture_everywhere, record_taken
from tests.engine.harness import DEVICE, drive, greedy, make_engine, prompts_of, run, speculation, write_pair


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


@pytest.mark.skipif(DEVICE == "npu", reason="its lengths are the host's: no round is captured")
def test_rounds_come_at_once_again_for_as_many_guesses_as_at_the_start(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are made for what was configured; other numbers go step by step."""
    capture_everywhere(monkeypatch)
    engine = make_engine(pair, speculation(pair, "ssd", lookahead=4, fan_out=2, on_miss="decline"))
    drafter = engine._speculator._worker._link._draft_worker._drafter  # type: ignore[attr-defined]
    asked: list[str] = []
    foresee, glue = drafter.foresee, drafter.glue
    monkeypatch.setattr(drafter, "foresee", lambda *args, **more: (asked.append("at once"), foresee(*args, **more))[1])
    monkeypatch.setattr(drafter, "glue", lambda *args: (asked.append("step by step"), glue(*args))[1])
    found = []
    try:
        for fan_out in ([], [1] * 5, [2] * 5):
            engine.tune(4, fan_out)
            asked.clear()
            drive(engine, prompts_of([5]), greedy(30))
            found.append(set(asked))
    finally:
        engine.close()
    assert found == [{"at once"}, {"step by step"}, {"at once"}]


@pytest.mark.skipif(DEVICE == "npu", reason="its lengths are the host's: nothing goes ahead")
def test_verifications_that_are_queued_carry_no_more_drafts_than_wanted(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with more would be thrown away, and be run twice."""
    capture_everywhere(monkeypatch)
    taken = record_taken(monkeypatch, HitsAhead, lambda plan, speculation: speculation.num_tokens)
    prompts = prompts_of([5, 6])
    plain = run(pair, prompts, greedy(60)).tokens
    engine = make_engine(pair, speculation(pair, "ssd", lookahead=4, on_miss="decline"))
    queued: list[int] = []
    ahead = engine._executor.ahead
    assert isinstance(ahead, HitsAhead)
    engine._speculator.queue_with(lambda rows: ahead.queue(rows) and not queued.append(len(rows)))  # type: ignore[attr-defined, func-returns-value]
    try:
        engine.tune(2)
        assert drive(engine, prompts, greedy(60)).tokens == plain
    finally:
        engine.close()
    assert len(queued) - len(taken) < 3
    assert max(map(max, taken)) == 2


@pytest.mark.skipif(DEVICE == "npu", reason="its lengths are the host's: nothing goes ahead")
@pytest.mark.parametrize("what", ["model", "eagle3"])
def test_chains_that_are_queued_are_no_longer_than_wanted(
    pair: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nor are whole rounds queued, which were captured for the most."""
    capture_everywhere(monkeypatch)
    prompts = prompts_of([5, 9])
    plain = run(pair, prompts, greedy(30)).tokens
    engine = make_engine(pair, speculation(pair, "sd", what, lookahead=4))
    asked: list[int] = []
    drafter = engine._speculator._drafter  # type: ignore[attr-defined]
    own, follow = drafter.chain, drafter.follow
    monkeypatch.setattr(drafter, "chain", lambda seqs, k: (asked.append(k), own(seqs, k))[1])
    monkeypatch.setattr(drafter, "follow", lambda *args: (asked.append(4), follow(*args))[1])
    try:
        engine.tune(1)
        found = drive(engine, prompts, greedy(30))
    finally:
        engine.close()
    assert found.tokens == plain
    assert set(asked) == {1}
    assert found.stats.speculation.drafted > 10


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
