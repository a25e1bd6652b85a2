"""Rounds of `sd` queued before the verdict they follow is on the host: the same answers, whoever comes, ends or gives
way meanwhile.

On a CPU a graph is the function itself (`capturing.py`), and a replay overwrites the outputs of the one before at once,
which a round that is read too late would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.rounds_ahead import RoundsAhead
from tests.engine.capturing import capture_everywhere, record_taken
from tests.engine.harness import BLOCK, DEVICE, greedy, make_engine, prompts_of, speculation
from tests.engine.test_run_ahead import answers

pytestmark = pytest.mark.skipif(DEVICE == "npu", reason="its lengths are the host's: no round goes ahead")
drafters = pytest.mark.parametrize("drafter", ["model", "eagle3"])
LOOKAHEAD = 4
PROMPTS = prompts_of([5, 12, 19, 33])


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this file capture whatever the device."""
    capture_everywhere(monkeypatch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sequences of each round that was under way when it was asked for."""
    return record_taken(monkeypatch, RoundsAhead, lambda plan, speculation: [row.seq.id for row in plan.decoding])


def engine_of(pair: Path, drafter: str, lookahead: int = LOOKAHEAD, **options: object) -> Engine:
    return make_engine(pair, speculation(pair, "sd", drafter, lookahead=lookahead), **options)


_PLAIN: dict[str, dict[int, list[int]]] = {}


def plain_answers(
    pair: Path, sampling: Sequence[SamplingParams], prompts: Sequence[list[int]] = PROMPTS
) -> dict[int, list[int]]:
    """Of an engine without drafts, once for each wish."""
    wish = repr((prompts, sampling))
    if wish not in _PLAIN:
        _PLAIN[wish] = answers(make_engine(pair, graphs=False), prompts, sampling, every=1)
    return dict(_PLAIN[wish])


def same_as_plain(
    pair: Path,
    drafter: str,
    sampling: Sequence[SamplingParams],
    *,
    every: int = 50,
    aborted: int = -1,
    lookahead: int = LOOKAHEAD,
    **options: object,
) -> None:
    """Drive an engine whose rounds go ahead, and a plain one."""
    ahead = answers(engine_of(pair, drafter, lookahead, **options), PROMPTS, sampling, every=every, aborted=aborted)
    plain = plain_answers(pair, sampling)
    if aborted >= 0:
        ahead[aborted] = plain[aborted]
    assert ahead == plain
    assert any(len(tokens) > 10 for tokens in plain.values())


@drafters
@pytest.mark.parametrize("every", [1, 7])
def test_same_tokens_whoever_comes_and_goes(pair: Path, taken: list[list[int]], drafter: str, every: int) -> None:
    """Prompts arrive between rounds, answers end at a stop token or at their limit, one is aborted."""
    sampling = [greedy(9 + 12 * i, ignore_eos=i % 2 == 0) for i in range(4)]
    same_as_plain(pair, drafter, sampling, every=every, aborted=2)
    assert len(taken) > 5  # how many rounds there are depends on the drafts that a device's arithmetic keeps
    assert max(map(len, taken)) > 1


@drafters
@pytest.mark.parametrize("lookahead", [1, 7])
def test_same_tokens_at_any_lookahead(pair: Path, taken: list[list[int]], drafter: str, lookahead: int) -> None:
    same_as_plain(pair, drafter, [greedy(40)] * 4, every=1, lookahead=lookahead)
    assert len(taken) > 3


@drafters
def test_same_tokens_where_blocks_are_short(pair: Path, taken: list[list[int]], drafter: str) -> None:
    """Sequences lose their blocks, and others compute where a queued round has written."""
    engine = engine_of(pair, drafter, num_kv_blocks=12)
    tokens = answers(engine, PROMPTS, [greedy(40)] * 4, every=1)
    assert engine.stats().preemptions > 0
    assert tokens == plain_answers(pair, [greedy(40)] * 4)
    assert taken


@drafters
def test_same_tokens_where_the_drafter_is_short_of_blocks(pair: Path, drafter: str) -> None:
    config = speculation(pair, "sd", drafter, lookahead=LOOKAHEAD, draft_kv_blocks=9)
    tokens = answers(make_engine(pair, config), PROMPTS, [greedy(30)] * 4, every=1)
    assert tokens == plain_answers(pair, [greedy(30)] * 4)


@drafters
def test_rounds_with_other_rows_wait_for_their_verdict(pair: Path, taken: list[list[int]], drafter: str) -> None:
    """A row that is drawn, or wants log-probabilities, keeps its round from being followed early; others go on."""
    drawn = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, reproducible=True)
    sampling = [drawn, greedy(60), greedy(12, logprobs=2), greedy(50)]
    same_as_plain(pair, drafter, sampling, every=1)
    assert len(taken) > 3
    assert {0, 2}.isdisjoint(set().union(*taken))


@drafters
def test_drafts_are_those_of_rounds_that_wait(pair: Path, taken: list[list[int]], drafter: str) -> None:
    """Not only the answers: what was drafted, and how far it stood, step by step of the algorithm."""
    counts = []
    for ahead in (False, True):
        engine = engine_of(pair, drafter)
        if not ahead:
            engine._executor.ahead = None
        answers(engine, PROMPTS, [greedy(24)] * 4, every=50)
        stats = engine.stats().speculation
        counts.append((stats.drafted_per_position, stats.accepted_per_position, stats.verify_rows))
    assert counts[0] == counts[1]
    assert len(taken) > 5


@drafters
def test_switched_off_and_on_again(pair: Path, taken: list[list[int]], drafter: str) -> None:
    """What is under way when speculation is tuned is dropped, or cut."""
    engine = engine_of(pair, drafter)

    def lengths() -> Callable[[], None]:
        order = iter([4, 4, 4, 0, 0, 4, 4, 2, 2, 4] * 20)
        return lambda: engine.tune(next(order))

    tune, step = lengths(), engine.step
    engine.step = lambda: (tune(), step())[1]  # type: ignore[method-assign,func-returns-value]
    tokens = answers(engine, PROMPTS, [greedy(40)] * 4, every=1)
    assert tokens == plain_answers(pair, [greedy(40)] * 4)
    assert taken


@drafters
def test_up_to_the_last_position(pair: Path, taken: list[list[int]], drafter: str) -> None:
    """Near the end of the model's length a round ahead would reach beyond it: it is not queued."""
    prompts = prompts_of([10, 33])
    longest = [greedy(54), greedy(31)]
    tokens = answers(engine_of(pair, drafter, max_model_len=64), prompts, longest, every=1)
    assert tokens == plain_answers(pair, longest, prompts)
    assert taken
    assert [len(own) for own in tokens.values()] == [54, 31]


@drafters
def test_blocks_of_a_queued_round_stay_its_sequence_s(pair: Path, drafter: str) -> None:
    """Between a verdict and the next plan nobody else may get what the round under way writes to."""
    engine = engine_of(pair, drafter)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(EngineRequest(id=i, prompt_token_ids=prompt, sampling=greedy(40)))
    ahead, scheduler, checked = engine._executor.ahead, engine._scheduler, 0
    assert isinstance(ahead, RoundsAhead)
    before: dict[int, list[int]] = {}
    while engine.has_work:
        engine.step()
        for seq in scheduler._queues.decoding:
            assert len(seq.block_table) * BLOCK >= seq.num_tokens + (LOOKAHEAD if ahead._queued is not None else 0)
            held = before.get(seq.id, [])
            assert seq.block_table[: len(held)] == held[: len(seq.block_table)]
            before[seq.id] = list(seq.block_table)
            checked += ahead._queued is not None
    engine.close()
    assert checked > 20


@pytest.mark.skipif(DEVICE != "cpu", reason="about CPUs")
def test_a_cpu_does_not_go_ahead_by_itself(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is the device: a round queued early would be computed before this one's tokens go out."""
    monkeypatch.undo()
    engine = engine_of(pair, "model")
    assert engine._executor.slots_ahead == 0
    engine.close()
