"""Steps that several ranks queue before their tokens are on any host: the same answers, and the same steps on every
rank in the same order, whoever comes, ends or gives way meanwhile.

The ranks are threads here (`thread_ranks.py`), on a CPU that claims to capture (`capturing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.hits_ahead import HitsAhead
from ssd_ascend.engine.rounds_ahead import RoundsAhead
from ssd_ascend.engine.run_ahead import RunAhead
from tests.engine.capturing import capture_everywhere, record_taken
from tests.engine.harness import DEVICE, greedy, make_engine, speculation
from tests.engine.test_run_ahead import PROMPTS, answers
from tests.engine.thread_ranks import ThreadRanks, ranks_as_threads

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="ranks of one process: test_tensor_parallel.py is for cards")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[ThreadRanks]:
    """Engines of this file capture, and have their ranks here."""
    capture_everywhere(monkeypatch)
    return ranks_as_threads(monkeypatch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was under way when it was asked for."""
    return record_taken(monkeypatch, RunAhead, lambda plan, speculation: len(plan.decoding))


_PLAIN: dict[str, dict[int, list[int]]] = {}


def plain_answers(pair: Path, sampling: Sequence[SamplingParams]) -> dict[int, list[int]]:
    """Of an engine with one rank, which queues nothing; once for each wish."""
    wish = repr(sampling)
    if wish not in _PLAIN:
        _PLAIN[wish] = answers(make_engine(pair, graphs=False), PROMPTS, sampling, every=1)
    return dict(_PLAIN[wish])


def same_as_one_rank(pair: Path, sampling: Sequence[SamplingParams], *, aborted: int = -1, **options: object) -> None:
    """Drive an engine of several ranks, and one that has one."""
    every = options.pop("every", 1)
    assert isinstance(every, int)
    engine = make_engine(pair, **{"tensor_parallel": 2, **options})
    found, plain = answers(engine, PROMPTS, sampling, every=every, aborted=aborted), plain_answers(pair, sampling)
    if aborted >= 0:
        found[aborted] = plain[aborted]
    assert found == plain
    assert any(len(tokens) > 10 for tokens in plain.values())


@pytest.mark.parametrize(("size", "every"), [(2, 1), (2, 7), (4, 3)])
def test_same_tokens_whoever_comes_and_goes(
    pair: Path, taken: list[int], made: list[ThreadRanks], size: int, every: int
) -> None:
    """Prompts arrive between steps, answers end at a stop token or at their limit, one is aborted."""
    sampling = [greedy(9 + 12 * i, ignore_eos=i % 2 == 0) for i in range(6)]
    same_as_one_rank(pair, sampling, every=every, aborted=3, tensor_parallel=size)
    assert len(taken) > 10
    assert max(taken) > 1
    assert len(made[0].ran) == size
    assert len(made[0].ran[0]) > len(taken)


def test_same_tokens_where_blocks_are_short(pair: Path, taken: list[int]) -> None:
    """Sequences lose their blocks, and others compute where a queued step has written."""
    engine = make_engine(pair, num_kv_blocks=13, tensor_parallel=2)
    assert answers(engine, PROMPTS, [greedy(40)] * 6, every=1) == plain_answers(pair, [greedy(40)] * 6)
    assert engine.stats().preemptions > 0
    assert len(taken) > 5


def test_drawn_rows_wait_for_their_tokens(pair: Path, taken: list[int]) -> None:
    """A step with a row that is drawn is not followed early; afterwards it is. Nor is one with a prompt."""
    drawn = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, reproducible=True)
    same_as_one_rank(pair, [drawn, greedy(60), drawn, greedy(50), greedy(20), drawn], every=5)
    assert 10 < len(taken) < 60


def test_a_step_that_nobody_takes_is_run_by_all(pair: Path, taken: list[int], made: list[ThreadRanks]) -> None:
    """Every sequence of a step that is under way is aborted, and others come; in the end the engine closes over one."""
    engine = make_engine(pair, tensor_parallel=2)
    ahead = engine._executor.ahead
    assert isinstance(ahead, RunAhead)
    for turn in range(4):
        for i in range(2):
            request = EngineRequest(id=10 * turn + i, prompt_token_ids=PROMPTS[i + turn % 2], sampling=greedy(90))
            engine.submit(request)
        for _ in range(4 + turn):
            engine.step()
        assert ahead._queued is not None
        if turn < 3:
            engine.abort([10 * turn, 10 * turn + 1])
    engine.close()
    assert len(made[0].ran[0]) > len(taken) + 4


# -- whole rounds of `sd`: drafts are on the first rank alone ----------------------------------------------------------

drafters = pytest.mark.parametrize("drafter", ["model", "eagle3"])


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each round that was under way when it was asked for."""
    return record_taken(monkeypatch, RoundsAhead, lambda plan, speculation: len(plan.decoding))


@drafters
@pytest.mark.parametrize(("size", "every"), [(2, 1), (4, 7)])
def test_rounds_whoever_comes_and_goes(pair: Path, rounds: list[int], drafter: str, size: int, every: int) -> None:
    sampling = [greedy(9 + 12 * i, ignore_eos=i % 2 == 0) for i in range(6)]
    sd = speculation(pair, "sd", drafter)
    same_as_one_rank(pair, sampling, speculation=sd, every=every, aborted=3, tensor_parallel=size)
    assert len(rounds) > 5
    assert max(rounds) > 1


@drafters
def test_rounds_where_blocks_are_short(pair: Path, rounds: list[int], drafter: str) -> None:
    engine = make_engine(pair, speculation(pair, "sd", drafter), num_kv_blocks=12, tensor_parallel=2)
    assert answers(engine, PROMPTS, [greedy(40)] * 6, every=1) == plain_answers(pair, [greedy(40)] * 6)
    assert engine.stats().preemptions > 0
    assert rounds


@drafters
def test_rounds_beside_drawn_rows(pair: Path, rounds: list[int], drafter: str) -> None:
    drawn = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, reproducible=True)
    sampling = [drawn, greedy(60), greedy(12, logprobs=2), greedy(50), greedy(20), greedy(33)]
    same_as_one_rank(pair, sampling, speculation=speculation(pair, "sd", drafter))
    assert len(rounds) > 3


def test_rounds_that_are_cut_and_dropped(pair: Path, rounds: list[int]) -> None:
    """Fewer drafts, none, and all again, while a round of the old length is under way; the engine closes over one."""
    engine = make_engine(pair, speculation(pair, "sd"), tensor_parallel=2)
    order, step = iter([4, 4, 4, 0, 0, 4, 4, 2, 2, 4] * 20), engine.step
    engine.step = lambda: (engine.tune(next(order)), step())[1]  # type: ignore[method-assign]
    assert answers(engine, PROMPTS, [greedy(40)] * 6, every=1) == plain_answers(pair, [greedy(40)] * 6)
    assert rounds
    other = make_engine(pair, speculation(pair, "sd"), tensor_parallel=2)
    ahead = other._executor.ahead
    assert isinstance(ahead, RoundsAhead)
    other.submit(EngineRequest(id=0, prompt_token_ids=PROMPTS[1], sampling=greedy(90)))
    for _ in range(4):
        other.step()
    assert ahead._queued is not None
    other.close()


def test_rounds_are_those_of_one_rank(pair: Path, rounds: list[int]) -> None:
    """Not only the answers: what was drafted, and how far it stood."""
    counts = []
    for size in (1, 2):
        engine = make_engine(pair, speculation(pair, "sd", "eagle3"), tensor_parallel=size)
        answers(engine, PROMPTS, [greedy(24)] * 6, every=50)
        stats = engine.stats().speculation
        counts.append((stats.drafted_per_position, stats.accepted_per_position, stats.verify_rows, len(rounds)))
        rounds.clear()
    assert counts[0] == counts[1]
    assert counts[0][3] > 5


@drafters
def test_hits_of_ssd(pair: Path, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """What is looked up is queued before commit: its tokens are told, and all ranks run it."""
    hits = record_taken(monkeypatch, HitsAhead, lambda plan, speculation: len(plan.decoding))
    config = speculation(pair, "ssd", drafter, fan_out=3, on_miss="decline")  # the rule that asks no clock
    sampling = [greedy(9 + 12 * i, ignore_eos=i % 2 == 0) for i in range(6)]
    same_as_one_rank(pair, sampling, speculation=config, aborted=3)
    assert len(hits) > 3
