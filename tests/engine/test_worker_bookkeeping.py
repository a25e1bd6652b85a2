"""What the draft worker does with time and memory: prompts in portions, branches cut short, one round of guesses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import Source, VerificationOutcome
from ssd_ascend.errors import TransportError
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.drafters.ngram import NgramDrafter
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.fallback import FallbackPolicy
from ssd_ascend.speculation.fan_out import FixedFanOut
from ssd_ascend.transport.inprocess import InProcessTransport
from ssd_ascend.transport.messages import Answer, Attach, Foreseen, Request, Update
from tests.engine.harness import drive, greedy, make_engine, prompts_of, run, speculation
from tests.engine.lines import worker_of

TEXT = [1, 2, 3, 4, 5] * 4


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_long_prompt_is_digested_in_portions(pair: Path, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """So that the others are answered in between. In the end the long one is drafted for like everybody else."""
    prompts = prompts_of([8, 400, 11])
    engine = make_engine(pair, speculation(pair, "ssd", drafter), max_batched_tokens=64)
    inner = worker_of(engine)._drafter
    assert isinstance(inner, PagedDrafter)
    own, sizes = ModelRunner.forward, []

    def forward(runner: ModelRunner, batch: ForwardBatch) -> ModelOutput:
        if runner is inner.runner:
            sizes.append(batch.num_tokens)
        return own(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    result = drive(engine, prompts, greedy(40))
    engine.close()
    assert result.tokens == run(pair, prompts, greedy(40)).tokens
    assert max(sizes) <= 3 * 32 + 3 * 5  # what is fed beside backlogs: short stretches, and drafts
    assert sum(size == 64 for size in sizes) >= 5
    drafted = [delta.stats.drafted for delta in result.last if delta.stats is not None]
    assert min(drafted) > 0


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_waiting_request_cuts_branches_but_no_chain(
    pair: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """A branch that is cut is shorter, not lost; a chain is what somebody waits for. A graph cannot be cut."""
    engine = make_engine(pair, speculation(pair, "ssd", drafter, on_miss="draft"), graphs=False)
    worker = worker_of(engine)
    own, lengths = PagedDrafter.branch, []

    def branch(self: PagedDrafter, *args: Any) -> Any:
        chain = own(self, *args[:-1], lambda: True)
        lengths.append(set(chain.num_tokens))
        return chain

    monkeypatch.setattr(PagedDrafter, "branch", branch)
    by_source: dict[Source, set[int]] = {}
    send = worker._send

    def sending(number: int, seqs: Any, replies: Any, stats: Any) -> None:
        for reply in replies:
            by_source.setdefault(reply.source, set()).add(len(reply.tokens))
        send(number, seqs, replies, stats)

    monkeypatch.setattr(worker, "_send", sending)
    prompts = prompts_of([9, 17, 3])
    result = drive(engine, prompts, greedy(40))
    engine.close()
    assert result.tokens == run(pair, prompts, greedy(40)).tokens
    assert lengths
    assert set().union(*lengths) == {1}
    assert by_source[Source.HIT] == {1}
    assert by_source[Source.MISS] == {4}


class Bench:
    """A worker over n-grams, which foresees without a model, and the target's end of its line."""

    def __init__(self) -> None:
        self.line, theirs = InProcessTransport.pair()
        drafter = NgramDrafter(num_target_tokens=10, device=torch.device("cpu"))
        fallback = FallbackPolicy("decline")
        self.worker = DraftWorker(drafter, theirs, lookahead=3, fan_out=FixedFanOut((2,) * 4), fallback=fallback)
        self.text = list(TEXT)
        self.foreseen: list[Foreseen] = []
        self._number = 0

    def attach(self) -> Answer:
        attach = Attach(
            seq_id=1,
            token_ids=list(self.text),
            num_prompt_tokens=5,
            sampling=SamplingParams(),
            seed=0,
            stop_ids=frozenset(),
        )
        self.send(attaches=[attach])
        return self.answer()

    def send(self, **parts: Any) -> None:
        self._number += 1
        self.line.send(Request(number=self._number, **parts))

    def update(self, *new_tokens: int) -> None:
        outcome = VerificationOutcome(1, len(new_tokens) - 1, new_tokens[-1])
        self.send(updates=[Update(outcome=outcome, num_tokens_before=len(self.text), new_tokens=list(new_tokens))])
        self.text += new_tokens

    def answer(self) -> Answer:
        self.worker.pump()
        while isinstance(message := self.line.recv(0.0), Foreseen):
            self.foreseen.append(message)
        assert isinstance(message, Answer)
        return message


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_late_worker_answers_a_hit_once_its_device_is_at_work(
    monkeypatch: pytest.MonkeyPatch, *, foreseen: bool
) -> None:
    """The target that waits for this answer will wait for the round behind it as well. Who was not foreseen is answered
    first, as is everybody whose request did not have to wait."""
    bench, events, waiting = Bench(), list[str](), [(2, 3, 4, 5) if foreseen else (2, 9)]
    own, send = NgramDrafter.foresee, bench.worker._transport.send

    def foresee(self: NgramDrafter, *args: Any, meanwhile: Any, **given: Any) -> Any:
        events.append("round")
        meanwhile()
        if waiting and len(bench.text) > len(TEXT):
            bench.update(*waiting.pop())
        return own(self, *args, meanwhile=meanwhile, **given)

    def sending(message: Any) -> None:
        events.append(type(message).__name__)
        send(message)

    monkeypatch.setattr(NgramDrafter, "foresee", foresee)
    monkeypatch.setattr(bench.worker._transport, "send", sending)
    bench.attach()
    bench.update(1)
    bench.worker.pump()
    late = ["round", "Answer"] if foreseen else ["Answer", "round"]
    told = ["Foreseen"] * foreseen
    assert events == ["Answer", "round", "Foreseen", "Answer", "round", *late, *told]
    answers = [message for message in iter(lambda: bench.line.recv(0.0), None) if isinstance(message, Answer)]
    assert [answer.number for answer in answers] == [2, 3]
    assert answers[-1].sources == [Source.HIT if foreseen else Source.DECLINED]


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_late_worker_that_drafts_step_by_step_answers_first(
    pair: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Of its round nothing is launched at once: the answer would wait for all of it."""
    engine = make_engine(pair, speculation(pair, "ssd", drafter), graphs=False)
    worker, events = worker_of(engine), list[str]()
    handle, send, glue = worker._handle, worker._send, PagedDrafter.glue

    def handling(message: Any) -> None:
        worker._is_late = True
        events.append("request")
        handle(message)

    def sending(*given: Any) -> None:
        events.append("answer")
        send(*given)

    def gluing(*given: Any) -> Any:
        events.append("glue")
        return glue(*given)

    monkeypatch.setattr(worker, "_handle", handling)
    monkeypatch.setattr(worker, "_send", sending)
    monkeypatch.setattr(PagedDrafter, "glue", gluing)
    prompts = prompts_of([9])
    result = drive(engine, prompts, greedy(30))
    engine.close()
    assert result.tokens == run(pair, prompts, greedy(30)).tokens
    assert result.stats.speculation.hits > 0
    assert events.count("glue") > 5
    assert all(then == "answer" for event, then in pairwise(events) if event == "request")


def test_the_foreseen_outcome_is_a_hit_and_another_is_not() -> None:
    bench = Bench()
    assert bench.attach().drafts == [[]]
    bench.update(1)
    answer = bench.answer()
    assert (answer.sources, answer.drafts) == ([Source.HIT], [[2, 3, 4]])
    bench.update(2, 3, 4, 5)
    answer = bench.answer()
    assert (answer.sources, answer.drafts) == ([Source.HIT], [[1, 2, 3]])
    bench.update(1, 9)
    assert bench.answer().sources == [Source.DECLINED]


def test_what_was_foreseen_is_told_before_it_is_asked_for() -> None:
    bench = Bench()
    bench.attach()
    bench.update(1)
    bench.answer()
    (told,) = bench.foreseen
    assert (told.number, told.seq_ids, told.num_tokens, told.counts) == (1, [1], [20], [1])
    assert told.entries == [0, 1, 3, 2, 3, 4]  # none accepted, then 1: three drafts


def test_what_is_asked_for_meanwhile_is_not_told_ahead() -> None:
    """The answer says as much."""
    bench = Bench()
    bench.attach()
    own = bench.worker._foresee

    def slow(*args: Any) -> None:
        bench.worker._foresee = own  # type: ignore[method-assign]
        own(*args)
        bench.update(2, 3, 4, 5)

    bench.worker._foresee = slow  # type: ignore[method-assign]
    bench.update(1)
    assert (bench.answer().sources, bench.answer().sources) == ([Source.HIT], [Source.HIT])
    assert [told.number for told in bench.foreseen] == [1]
    last = bench.line.recv(0.0)
    assert isinstance(last, Foreseen)
    assert last.number == 3


def test_a_step_that_was_skipped_takes_its_guesses_along() -> None:
    """Two requests at once: only the later one is answered, and not with what was foreseen two steps ago."""
    bench = Bench()
    bench.attach()
    bench.update(9)
    bench.update(1)  # foreseen after the attach, not after this 9
    first, second = bench.answer(), bench.answer()
    assert (first.number, first.seq_ids) == (2, [])
    assert (second.number, second.sources) == (3, [Source.DECLINED])


def test_an_update_that_does_not_follow_is_refused() -> None:
    bench = Bench()
    bench.attach()
    bench.text = bench.text[:-1]
    bench.update(4)
    with pytest.raises(TransportError, match="after 19 tokens, but here: 20 tokens"):
        bench.worker.pump()


def test_an_attach_replaces_what_was_known() -> None:
    bench = Bench()
    bench.attach()
    bench.text = [1, 2, 3, 1, 2]
    bench.attach()
    bench.update(3)
    assert bench.answer().sources == [Source.HIT]
    assert len(bench.worker._sequences) == 1


def test_a_released_sequence_is_unknown() -> None:
    bench = Bench()
    bench.attach()
    bench.send(released=[1, 5])
    bench.answer()
    assert (bench.worker._sequences, len(bench.worker._cache)) == ({}, 0)
    bench.update(1)
    with pytest.raises(TransportError, match="no such sequence"):
        bench.worker.pump()
