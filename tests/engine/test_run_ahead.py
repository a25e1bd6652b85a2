"""Steps queued before their inputs are known on the host: the same answers, whoever comes, ends or gives way meanwhile.

On a CPU a replay overwrites the outputs of the one before at once, which a step that is read too late would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.run_ahead import RunAhead
from tests.engine.harness import DEVICE, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class Counting(RunAhead):
    """Counts the steps that were under way when they were asked for."""

    taken = 0

    def take(self, plan, speculation):  # type: ignore[no-untyped-def]  # as the method it wraps
        output = super().take(plan, speculation)
        self.taken += output is not None
        return output


def engine_of(pair: Path, *, ahead: bool, **options: object) -> Engine:
    engine = make_engine(pair, **options)
    engine._executor.ahead = Counting(engine._executor.target) if ahead else None
    engine._scheduler.slots_ahead = RunAhead.slots if ahead else 0
    return engine


def answers(
    engine: Engine, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], *, every: int, aborted: int = -1
) -> dict[int, list[int]]:
    """Submit a prompt every so many steps, abort one of them on the way; the tokens of each to the end."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    waiting, steps = list(range(len(prompts))), 0
    while waiting or engine.has_work:
        if waiting and (steps % every == 0 or not engine.has_work):
            i = waiting.pop(0)
            engine.submit(EngineRequest(id=i, prompt_token_ids=prompts[i], sampling=sampling[i]))
        if steps == 25 and aborted >= 0:
            engine.abort([aborted])
        for delta in engine.step():
            if delta.seq_id != aborted:
                tokens[delta.seq_id] += delta.token_ids
        steps += 1
    engine.close()
    return tokens


PROMPTS = [[3 + (i * j) % 17 for j in range(1, 6 + 7 * i)] for i in range(6)]


def both(pair: Path, sampling: Sequence[SamplingParams], *, every: int, aborted: int = -1, **options: object) -> int:
    """Compare with an engine that does not run ahead; how many steps were under way already."""
    plain = answers(engine_of(pair, ahead=False, **options), PROMPTS, sampling, every=every, aborted=aborted)
    engine = engine_of(pair, ahead=True, **options)
    counting = engine._executor.ahead
    assert isinstance(counting, Counting)
    assert answers(engine, PROMPTS, sampling, every=every, aborted=aborted) == plain
    assert any(len(tokens) > 10 for tokens in plain.values())
    return counting.taken


@pytest.mark.parametrize("every", [1, 7, 50])
def test_same_tokens_whoever_comes_and_goes(pair: Path, every: int) -> None:
    sampling = [SamplingParams(temperature=0.0, max_tokens=9 + 8 * i, ignore_eos=i % 2 == 0) for i in range(6)]
    assert both(pair, sampling, every=every, aborted=3) > 20


def test_same_tokens_where_blocks_are_short(pair: Path) -> None:
    """Sequences lose their blocks, and others compute where a queued step has written."""
    sampling = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 6
    assert both(pair, sampling, every=1, num_kv_blocks=13) > 5


def test_drawn_rows_wait_for_their_tokens(pair: Path) -> None:
    """A step with a row that is drawn is not followed early; afterwards it is."""
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    longer = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    taken = both(pair, [drawn, longer, drawn, longer, drawn, longer], every=1)
    assert 20 < taken < 60


def test_a_step_ahead_is_of_this_very_position(pair: Path) -> None:
    engine = engine_of(pair, ahead=True)
    engine.submit(EngineRequest(id=0, prompt_token_ids=[5, 6, 7], sampling=GREEDY))
    engine.step()
    engine.step()
    ahead, sequence = engine._executor.ahead, engine._scheduler._queues.by_id[0]
    assert ahead is not None
    plan = engine._scheduler.schedule()
    sequence.token_ids.append(1)  # as if more had been committed than one token
    assert ahead.take(plan, Speculation.declined(1)) is None
    engine.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="about CPUs")
def test_a_cpu_does_not_run_ahead_by_itself(pair: Path) -> None:
    """Its host is the device: a step queued early would be computed before this one's tokens go out."""
    engine = make_engine(pair)
    assert engine._executor.slots_ahead == 0
    engine.close()
