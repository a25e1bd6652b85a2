"""Prompts that a worker with a device of its own reads while the target reads them: drafts follow the first token.

The worker is in this process, so that it has always read by then; that it has a device of its own is only said here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import Source
from ssd_ascend.engine.engine import Engine
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.speculators.ssd import SsdSpeculator
from ssd_ascend.speculation.worker_client import WorkerClient
from ssd_ascend.transport.messages import Message, Request
from tests.engine.harness import drive, greedy, make_engine, prompts_of, run, speculation
from tests.engine.test_run_ahead import answers

PROMPTS = prompts_of([5, 12, 40, 26, 33])


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the worker is asked, in order."""
    requests: list[Request] = []
    own = DraftWorker._handle

    def handle(self: DraftWorker, message: Message) -> None:
        if isinstance(message, Request):
            requests.append(message)
        own(self, message)

    monkeypatch.setattr(DraftWorker, "_handle", handle)
    return requests


def engine_of(pair: Path, drafter: str = "model", *, apart: bool = True, **options: Any) -> Engine:
    engine = make_engine(pair, speculation(pair, "ssd", drafter, fan_out=4), **options)
    assert isinstance(engine._speculator, SsdSpeculator)
    assert not engine._speculator.is_apart, "it shares this very thread"
    engine._speculator.is_apart = apart
    return engine


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("every", [1, 7])
def test_same_tokens_whoever_comes_and_goes(pair: Path, heard: list[Request], drafter: str, every: int) -> None:
    """Prompts in chunks; one arrives while others decode; one is aborted, one ends with its first token."""
    sampling = [greedy(1), *(greedy(9 + 8 * i, ignore_eos=i % 2 == 0) for i in range(4))]
    small: dict[str, Any] = {"max_batched_tokens": 16, "max_num_seqs": 3}
    told = answers(engine_of(pair, drafter, **small), PROMPTS, sampling, every=every, aborted=4)
    plain = answers(make_engine(pair, **small), PROMPTS, sampling, every=every)
    told[4] = plain[4]
    assert told == plain
    assert any(request.attaches and not request.updates for request in heard)


def test_the_first_token_was_foreseen(pair: Path, heard: list[Request]) -> None:
    """Where the worker shares the target's device the first decode step has no drafts; here they are there at once."""
    offered = {}
    for apart in (False, True):
        engine = engine_of(pair, apart=apart)
        propose = engine._speculator.propose
        found: list[tuple[list[int], list[Source]]] = []

        def spy(rows: Any, propose: Any = propose, found: list[Any] = found) -> Any:
            speculation = propose(rows)
            found.append((speculation.num_tokens, speculation.source))
            return speculation

        engine._speculator.propose = spy  # type: ignore[method-assign]
        tokens = drive(engine, [PROMPTS[1]], greedy(12)).tokens
        offered[apart] = found[1]
        engine.close()
    assert offered[False] == ([0], [Source.DECLINED])
    assert offered[True] == ([4], [Source.HIT])
    assert tokens == run(pair, [PROMPTS[1]], greedy(12)).tokens
    assert heard[-1].released or heard[-1].updates


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        ("eagle3", greedy(8)),
        ("model", SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)),
        ("model", greedy(8, speculation=False)),
        ("model", greedy(1)),
    ],
    ids=["features", "drawn", "not drafted for", "one token"],
)
def test_who_would_gain_nothing_is_not_told_of(
    pair: Path, heard: list[Request], drafter: str, sampling: SamplingParams
) -> None:
    drive(engine_of(pair, drafter), [PROMPTS[1]], sampling)
    assert [request for request in heard if request.attaches and not request.updates][1:] == []
    assert all(len(attach.token_ids) > len(PROMPTS[1]) for request in heard for attach in request.attaches)


def test_who_decodes_is_not_interrupted(pair: Path, heard: list[Request]) -> None:
    """A prompt that comes beside decoding rows is told of with their outcomes, once it has its first token."""
    engine = engine_of(pair)
    answers(engine, PROMPTS[:2], [greedy(40)] * 2, every=7)
    first, second = [request for request in heard if request.attaches]
    assert len(first.attaches[0].token_ids) == len(PROMPTS[0])
    assert len(second.attaches[0].token_ids) == len(PROMPTS[1]) + 1
    assert second.updates


def test_a_worker_that_has_not_read_yet_is_not_waited_for(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target decodes plainly until the prompt is read; a look-up for it is counted from then on only."""
    monkeypatch.setattr(DraftWorker, "_tell_ahead", lambda *args: None)
    waits = []
    own = WorkerClient.collect

    def collect(self: WorkerClient) -> None:
        waits.append(bool(self._open))
        own(self)

    monkeypatch.setattr(WorkerClient, "collect", collect)
    engine = engine_of(pair)
    assert drive(engine, [PROMPTS[1]], greedy(12)).tokens == run(pair, [PROMPTS[1]], greedy(12)).tokens
    assert waits[:2] == [False, False]
    assert any(waits)


def test_a_sequence_that_loses_its_blocks_is_told_of_anew(pair: Path, heard: list[Request]) -> None:
    engine = engine_of(pair, num_kv_blocks=16)
    sampling = [greedy(40)] * 5
    told = answers(engine, PROMPTS, sampling, every=1)
    assert engine.stats().preemptions > 0
    assert told == answers(make_engine(pair, graphs=False), PROMPTS, sampling, every=1)
    attached = [attach.seq_id for request in heard for attach in request.attaches]
    assert len(attached) > len(set(attached))
