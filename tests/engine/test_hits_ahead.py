"""Verifications of `ssd` queued before the scheduler has committed the step they follow: the same answers, and the same
drafts, whoever comes, ends or gives way meanwhile.

On a CPU a graph is the function itself (`capturing.py`), and a replay overwrites the outputs of the one before at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ssd_ascend.core.batch import ForwardBatch
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.hits_ahead import HitsAhead
from ssd_ascend.runtime.graphs import Prepared
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.pack import Arriving
from tests.engine.capturing import capture_everywhere, record_taken
from tests.engine.harness import BLOCK, DEVICE, greedy, make_engine, prompts_of, speculation
from tests.engine.lines import Late, through
from tests.engine.test_run_ahead import answers

pytestmark = pytest.mark.skipif(DEVICE == "npu", reason="its lengths are the host's: nothing goes ahead")
drafters = pytest.mark.parametrize("drafter", ["model", "eagle3", "ngram"])
LOOKAHEAD = 4
PROMPTS = prompts_of([5, 12, 19, 26, 33])


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this file capture whatever the device."""
    capture_everywhere(monkeypatch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Drafts of each row of the steps that were under way when they were asked for."""
    return record_taken(monkeypatch, HitsAhead, lambda plan, speculation: speculation.num_tokens)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each walk that was practised up to the launch: every verdict is waited for, at a worker elsewhere."""
    found: list[int] = []
    own = Prepared.send

    def is_there(self: Arriving) -> bool:
        self.looks = getattr(self, "looks", 0) + 1  # type: ignore[attr-defined]
        return self.looks > 4

    def send(self: Prepared, rows: Sequence[Row], *, aside: bool = False) -> ForwardBatch | None:
        found.extend([len(rows)] if aside else [])
        return own(self, rows, aside=aside)

    monkeypatch.setattr(Arriving, "is_there", is_there)
    monkeypatch.setattr(Prepared, "send", send)
    monkeypatch.setattr("ssd_ascend.speculation.speculators.ssd.is_beside_the_target", lambda setup: False)
    return found


def engine_of(pair: Path, drafter: str, *, on_miss: str = "decline", **options: object) -> Engine:
    return make_engine(pair, speculation(pair, "ssd", drafter, lookahead=LOOKAHEAD, on_miss=on_miss), **options)


def plainly(pair: Path, sampling: Sequence[SamplingParams], *, every: int = 50) -> dict[int, list[int]]:
    return answers(make_engine(pair, graphs=False), PROMPTS, sampling, every=every)


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_practice_changes_nothing(
    pair: Path, taken: list[list[int]], walks: list[int], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither tokens nor drafts nor counters, whoever ends or comes between a walk and the step itself."""
    counts, sampling = [], [greedy(9 + 12 * i, ignore_eos=i % 2 == 0) for i in range(5)]
    for practises in (True, False):
        engine, drafts = engine_of(pair, drafter), len(taken)
        engine._practice = engine._practice if practises else None
        before = len(walks)
        tokens = answers(engine, PROMPTS, sampling, every=7)
        stats = engine.stats().speculation
        counts.append((tokens, replace(stats, draft_idle_s=0.0, target_wait_s=0.0), taken[drafts:]))
        assert (len(walks) > before + 10) is practises
    assert counts[0] == counts[1]
    assert counts[0][0] == plainly(pair, sampling, every=7)
    assert max(walks) > 1


def test_nothing_is_practised_beside_a_worker_of_the_same_process(pair: Path) -> None:
    """It would wait for the interpreter."""
    assert engine_of(pair, "model")._practice is None


@drafters
@pytest.mark.parametrize("every", [1, 7])
def test_same_tokens_whoever_comes_and_goes(pair: Path, taken: list[list[int]], drafter: str, every: int) -> None:
    """Prompts arrive between steps, answers end at a stop token or at their limit, one is aborted."""
    sampling = [greedy(9 + 12 * i, ignore_eos=i % 2 == 0) for i in range(5)]
    ahead = answers(engine_of(pair, drafter), PROMPTS, sampling, every=every, aborted=4)
    plain = plainly(pair, sampling, every=every)
    ahead[4] = plain[4]
    assert ahead == plain
    assert len(taken) > 5
    assert drafter == "ngram" or any(max(drafts) > 1 for drafts in taken)


@pytest.mark.parametrize("on_miss", ["auto", "draft"])
def test_a_step_somebody_waits_for_is_not_queued(pair: Path, taken: list[list[int]], on_miss: str) -> None:
    """What a missing row gets is not known before the worker's answer."""
    sampling = [greedy(40)] * 5
    ahead = answers(engine_of(pair, "model", on_miss=on_miss), PROMPTS, sampling, every=7)
    assert ahead == plainly(pair, sampling, every=7)
    assert taken


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_drafts_are_those_of_steps_that_wait(pair: Path, taken: list[list[int]], drafter: str) -> None:
    """Not only the answers: every counter of the algorithm."""
    counts = []
    for ahead in (False, True):
        engine = engine_of(pair, drafter)
        if not ahead:
            engine._speculator.queue_with(lambda rows: False)  # type: ignore[attr-defined]
        answers(engine, PROMPTS, [greedy(32)] * 5, every=50)
        stats = engine.stats().speculation
        counts.append(replace(stats, draft_idle_s=0.0, target_wait_s=0.0))
    assert counts[0] == counts[1]
    assert len(taken) > 10


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_same_tokens_where_blocks_are_short(pair: Path, taken: list[list[int]], drafter: str) -> None:
    """Sequences lose their blocks, and others compute where a queued step has written."""
    cramped = {"num_kv_blocks": 16 * 16 // BLOCK or 1} if DEVICE == "cpu" else {}
    engine = engine_of(pair, drafter, **cramped)
    tokens = answers(engine, PROMPTS, [greedy(40)] * 5, every=1)
    assert DEVICE != "cpu" or engine.stats().preemptions > 0
    assert tokens == plainly(pair, [greedy(40)] * 5, every=1)
    assert taken


def test_other_rows_keep_a_step_back(pair: Path, taken: list[list[int]]) -> None:
    """A row that is drawn, wants log-probabilities, or is not to be drafted for; the others go on when it has ended."""
    drawn = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, reproducible=True)
    sampling = [drawn, greedy(50), greedy(12, logprobs=2), greedy(12, speculation=False), greedy(40)]
    assert answers(engine_of(pair, "model"), PROMPTS, sampling, every=1) == plainly(pair, sampling, every=1)
    assert len(taken) > 3
    assert max(map(len, taken)) <= 2


def test_switched_off_and_on_again(pair: Path, taken: list[list[int]]) -> None:
    """What is under way when speculation is tuned is dropped."""
    engine = engine_of(pair, "model")
    order = iter([4, 4, 4, 0, 0, 4, 4, 2, 2, 4] * 40)
    step = engine.step

    def tuned() -> object:
        engine.tune(next(order))
        return step()

    engine.step = tuned  # type: ignore[method-assign,assignment]
    tokens = answers(engine, PROMPTS, [greedy(40)] * 5, every=1)
    assert tokens == plainly(pair, [greedy(40)] * 5, every=1)
    assert taken


def test_up_to_the_last_position(pair: Path, taken: list[list[int]]) -> None:
    prompts, longest = prompts_of([10, 33]), [greedy(118), greedy(95)]
    tokens = answers(engine_of(pair, "model", max_model_len=128), prompts, longest, every=1)
    assert tokens == answers(make_engine(pair, graphs=False), prompts, longest, every=1)
    assert taken
    assert [len(own) for own in tokens.values()] == [118, 95]


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_worker_that_is_late_or_gone_changes_nothing(
    pair: Path, monkeypatch: pytest.MonkeyPatch, taken: list[list[int]], drafter: str
) -> None:
    through(monkeypatch, lambda line: Late(line, seed=3, most=3, pile_up=True))
    tokens = answers(engine_of(pair, drafter), PROMPTS, [greedy(40)] * 5, every=3)
    assert tokens == plainly(pair, [greedy(40)] * 5, every=3)
    assert taken


def test_a_worker_that_dies_under_a_queued_step(pair: Path, taken: list[list[int]]) -> None:
    engine = engine_of(pair, "model")
    step, steps = engine.step, 0

    def dying() -> object:
        nonlocal steps
        steps += 1
        if steps == 12:
            engine._speculator._worker._lose("it was killed")  # type: ignore[attr-defined]
        return step()

    engine.step = dying  # type: ignore[method-assign,assignment]
    tokens = answers(engine, PROMPTS, [greedy(40)] * 5, every=1)
    assert tokens == plainly(pair, [greedy(40)] * 5, every=1)
    assert taken


@pytest.mark.skipif(DEVICE != "cpu", reason="about CPUs")
def test_a_cpu_does_not_go_ahead_by_itself(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    engine = engine_of(pair, "model")
    assert engine._executor.slots_ahead == 0
    engine.close()


def test_a_verdict_is_sent_for_where_it_is_all_that_is_asked(pair: Path) -> None:
    """Drawn rows have their tokens from kernels that must be queued meanwhile, not once it is there."""
    heard: list[bool] = []
    for sampling in (greedy(20), SamplingParams(temperature=0.9, seed=5, max_tokens=20)):
        engine = engine_of(pair, "model")
        own = engine._speculator.meanwhile
        engine._speculator.meanwhile = lambda verdict, own=own: (heard.append(verdict is not None), own(verdict))[1]  # type: ignore[method-assign,misc]
        answers(engine, PROMPTS[:1], [sampling], every=50)
        assert any(heard) is sampling.greedy
        heard.clear()
