"""The target's end of the line, against a worker that the test plays: late, silent, gone, or talking nonsense."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, VerificationOutcome
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.errors import TransportError
from ssd_ascend.speculation import worker_client
from ssd_ascend.speculation.offers import Asked
from ssd_ascend.speculation.worker_client import WorkerClient
from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport.messages import (
    PROTOCOL_VERSION,
    Answer,
    Attach,
    Foreseen,
    Hello,
    Message,
    Request,
    Update,
    WorkerStats,
)

VOCAB, DEPTH = 10, 3


class Line:
    """A transport whose other side is the test. Time passes only here: a `recv` that finds nothing waits it out."""

    def __init__(self, clock: Clock) -> None:
        self.sent: list[Request] = []
        self.waits: list[float] = []
        self._due: deque[tuple[float, Message | Exception]] = deque()
        self._clock = clock
        self.closed = False

    def due(self, message: Message | Exception, *, after_s: float = 0.0) -> None:
        """The worker will say this, so many seconds from now."""
        self._due.append((self._clock.now + after_s, message))

    def send(self, message: Message) -> None:
        assert isinstance(message, Request)
        if self.closed:
            raise TransportError("the other side closed the line")
        self.sent.append(message)

    def recv(self, timeout_s: float | None) -> Message | None:
        assert timeout_s is not None, "a step never waits for ever"
        self.waits.append(timeout_s)
        if not self._due or self._due[0][0] > self._clock.now + timeout_s:
            self._clock.now += timeout_s
            return None
        at, message = self._due.popleft()
        self._clock.now = max(self._clock.now, at)
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.closed = True


class Clock:
    """`time.monotonic` as the test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0


class Link:
    """Hands out the worker that the test put in service."""

    restarts = 0
    work_s: float | None = None

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.reports: list[tuple[int, str]] = []

    def current(self) -> Worker | None:
        return self.worker

    def report(self, generation: int, reason: str) -> None:
        self.reports.append((generation, reason))
        self.worker = None
        self.restarts += 1

    def health(self) -> str | None:
        return None if self.worker else "no worker"

    def close(self) -> None:
        self.worker = None


class Stage:
    """A client, and everything it talks to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.link, self.stats = Clock(), Link(), SpeculationStats()
        monkeypatch.setattr(worker_client.time, "monotonic", lambda: self.clock.now)
        self.client = WorkerClient(self.link, self.stats, target_vocab=VOCAB, lookahead=DEPTH, silence_s=10.0)
        self.line = self.new_worker(1)
        self.knows()

    def new_worker(self, generation: int) -> Line:
        line = Line(self.clock)
        hello = Hello(
            version=PROTOCOL_VERSION,
            target_vocab=VOCAB,
            draft_vocab=VOCAB,
            feature_width=0,
            lookahead=DEPTH,
            drafter="model",
        )
        self.link.worker = Worker(line, hello, generation)
        assert self.client.is_ready()
        return line

    def knows(self, seq_id: int = 1) -> None:
        """As if the worker in service had been told of it before."""
        self.client.attached.add(seq_id)

    def post(self, seq_id: int = 1, num_tokens: int = 8) -> None:
        """One sequence that has `num_tokens` tokens now."""
        if seq_id in self.client.attached:
            outcome = VerificationOutcome(seq_id, 0, 4)
            update = Update(outcome=outcome, num_tokens_before=num_tokens - 1, new_tokens=[4])
            self.client.post([], [update], {seq_id: Asked(num_tokens, True)})
            return
        attach = Attach(
            seq_id=seq_id,
            token_ids=[3] * num_tokens,
            num_prompt_tokens=4,
            sampling=SamplingParams(),
            seed=0,
            stop_ids=frozenset(),
        )
        self.client.post([attach], [], {seq_id: Asked(num_tokens, False)})

    def answered(self, num_tokens: int = 8, *, after_s: float = 0.001) -> None:
        """A round that goes well."""
        self.post(num_tokens=num_tokens)
        self.line.due(answer(self.line.sent[-1].number), after_s=after_s)
        self.client.collect()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def answer(number: int, **changes: Any) -> Answer:
    """Three drafts for sequence 1, a hit."""
    plain: dict[str, Any] = {
        "number": number,
        "seq_ids": [1],
        "sources": [Source.HIT],
        "drafts": [[5, 6, 7]],
        "has_law": [False],
        "stats": WorkerStats(idle_s=float(number)),
    }
    return Answer(**{**plain, **changes})


def sequence(num_tokens: int, seq_id: int = 1) -> Sequence:
    return Sequence(
        id=seq_id,
        token_ids=[3] * num_tokens,
        num_prompt_tokens=4,
        sampling=SamplingParams(),
        stop_ids=frozenset(),
        max_total_tokens=100,
        seed=0,
        arrival_s=0.0,
    )


def test_an_answer_becomes_an_offer_that_is_taken_once(stage: Stage) -> None:
    law = torch.randn(1, DEPTH, VOCAB)
    stage.post()
    stage.line.due(answer(1, drafts=[[5, 6]], has_law=[True], law=law))
    stage.client.collect()
    offer = stage.client.take(sequence(8))
    assert offer is not None
    assert (offer.tokens, offer.source, offer.looked_up) == ([5, 6], Source.HIT, True)
    assert offer.law is not None
    assert torch.equal(offer.law, law[0, :2])
    assert stage.client.take(sequence(8)) is None


def test_an_offer_for_other_tokens_is_no_offer(stage: Stage) -> None:
    stage.answered()
    assert stage.client.take(sequence(9)) is None


def test_a_released_sequence_gets_nothing_and_the_worker_hears_of_it(stage: Stage) -> None:
    stage.post(2)
    stage.post(1)
    stage.client.release([1, 77])
    stage.line.due(answer(2))
    stage.client.collect()
    assert stage.client.take(sequence(8)) is None
    stage.post(2, num_tokens=9)
    assert stage.line.sent[-1].released == [1]
    assert stage.client.attached == {2}


def test_when_the_last_sequence_goes_the_worker_hears_of_it_at_once(stage: Stage) -> None:
    """No later request may ever come."""
    stage.post(1)
    stage.client.release([1])
    assert [request.released for request in stage.line.sent] == [[], [1]]
    stage.line.due(answer(1))
    stage.line.due(answer(2, seq_ids=[], sources=[], drafts=[], has_law=[]))
    stage.answered(9)  # attached anew: nothing to wait for
    stage.answered(10)
    assert stage.client.take(sequence(10)) is not None
    assert stage.link.reports == []


def broken(**changes: Any) -> Callable[[], Message]:
    return lambda: answer(1, **changes)


NONSENSE: dict[str, Callable[[], Message]] = {
    "a number never asked": lambda: answer(2),
    "a number long answered": lambda: answer(0),
    "another sequence": broken(seq_ids=[2]),
    "a sequence twice": broken(seq_ids=[1, 1], sources=[Source.HIT] * 2, drafts=[[0] * 3] * 2, has_law=[False] * 2),
    "a token too large": broken(drafts=[[5, VOCAB, 7]]),
    "a token below zero": broken(drafts=[[5, -1, 7]]),
    "too many drafts": broken(drafts=[[5, 6, 7, 8]]),
    "rows too many": broken(drafts=[[5, 6, 7]] * 2),
    "no sources": broken(sources=[]),
    "no drafts": broken(drafts=[]),
    "no word on laws": broken(has_law=[]),
    "a source unknown": broken(sources=[9]),
    "a law that is missing": broken(has_law=[True]),
    "a law of another vocabulary": broken(has_law=[True], law=torch.zeros(1, DEPTH, VOCAB + 1)),
    "laws too many": broken(has_law=[True], law=torch.zeros(2, DEPTH, VOCAB)),
    "no answer at all": lambda: Request(number=1),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_the_worker_and_offers_nothing(stage: Stage, what: str) -> None:
    stage.post()
    stage.line.due(NONSENSE[what]())
    stage.client.collect()
    assert [generation for generation, _ in stage.link.reports] == [1]
    assert stage.client.take(sequence(8)) is None
    assert stage.client.attached == set()
    assert not stage.client.is_ready()
    assert (stage.stats.worker_alive, stage.stats.worker_restarts) == (False, 1)
    stage.client.collect()  # a step without a worker waits for nobody
    stage.post()


def test_a_line_that_breaks_is_reported_once_and_the_next_worker_knows_nobody(stage: Stage) -> None:
    stage.answered()
    stage.post(num_tokens=9)
    stage.line.due(TransportError("the other side closed the line"))
    stage.client.collect()
    assert stage.link.reports == [(1, "the other side closed the line")]
    stage.line = stage.new_worker(2)
    assert stage.client.attached == set()
    stage.post(num_tokens=10)
    assert [len(stage.line.sent), len(stage.line.sent[0].attaches), stage.line.sent[0].updates] == [1, 1, []]
    stage.line.due(answer(stage.line.sent[-1].number, drafts=[[]], sources=[Source.DECLINED]))
    stage.answered(num_tokens=11)
    assert stage.client.take(sequence(11)) is not None


def test_a_line_that_is_gone_before_the_post(stage: Stage) -> None:
    stage.line.close()
    stage.post()
    assert len(stage.link.reports) == 1
    stage.client.collect()


def test_patience_is_in_proportion_to_experience(stage: Stage) -> None:
    """A second for a stranger; then four times the usual, at least 50 ms."""
    stage.post()
    stage.client.collect()
    assert stage.line.waits == [1.0]
    stage.line.due(answer(1))
    for num_tokens in range(9, 30):
        stage.answered(num_tokens, after_s=0.03)
    stage.line.waits.clear()
    stage.answered(30, after_s=0.03)
    assert stage.line.waits == [pytest.approx(0.12)]
    for num_tokens in range(31, 50):
        stage.answered(num_tokens, after_s=0.001)
    started = stage.clock.now
    stage.post(num_tokens=50)
    stage.client.collect()
    assert stage.clock.now - started == pytest.approx(0.05)


def test_time_that_the_step_spent_itself_is_not_waited_again(stage: Stage) -> None:
    for num_tokens in range(8, 20):
        stage.answered(num_tokens)
    stage.post(num_tokens=20)
    stage.clock.now += 0.04
    stage.line.waits.clear()
    stage.client.collect()
    assert stage.line.waits == [pytest.approx(0.01)]


def test_a_worker_that_was_late_is_polled_until_it_is_heard_of_and_then_waited_for_again(stage: Stage) -> None:
    """Its stale answers are dropped; as soon as it has caught up its drafts count again."""
    for num_tokens in range(8, 20):
        stage.answered(num_tokens)
    stage.post(num_tokens=20)
    stage.client.collect()
    for num_tokens in (21, 22):
        stage.line.waits.clear()
        stage.post(num_tokens=num_tokens)
        stage.client.collect()
        assert stage.line.waits == [0.0]
        assert stage.client.take(sequence(num_tokens)) is None
    late = [request.number for request in stage.line.sent[-3:]]
    for number in late[:2]:
        stage.line.due(answer(number, seq_ids=[], sources=[], drafts=[], has_law=[]))
    stage.line.due(answer(late[2]))
    stage.post(num_tokens=23)
    stage.line.due(answer(late[2] + 1), after_s=0.002)
    stage.client.collect()
    assert stage.client.take(sequence(23)) is not None
    assert stage.stats.wasted == 3  # the drafts that came too late
    assert stage.link.reports == []


def test_silence_ends_a_worker_only_after_its_time(stage: Stage) -> None:
    stage.answered()
    started = stage.clock.now
    num_tokens = 9
    while not stage.link.reports:
        stage.post(num_tokens=num_tokens)
        stage.client.collect()
        stage.clock.now += 0.5
        num_tokens += 1
    assert 10.0 < stage.clock.now - started < 11.5
    assert "no answer for 10." in stage.link.reports[0][1]


def test_a_silent_worker_that_computes_is_given_longer(stage: Stage) -> None:
    stage.answered()
    started = stage.clock.now
    num_tokens = 9
    while not stage.link.reports:
        stage.link.work_s = 0.4 * stage.clock.now
        stage.post(num_tokens=num_tokens)
        stage.client.collect()
        stage.clock.now += 0.5
        num_tokens += 1
    assert 60.0 < stage.clock.now - started < 62.0


def test_an_idle_target_is_no_silent_worker(stage: Stage) -> None:
    stage.answered()
    stage.clock.now += 3600.0
    stage.answered(9)
    assert stage.link.reports == []
    assert stage.client.take(sequence(9)) is not None


def test_totals_outlive_a_worker(stage: Stage) -> None:
    first = WorkerStats(idle_s=2.0, cached_drafts=50, used_drafts=20, cache_bytes=7)
    stage.post()
    stage.line.due(answer(1, stats=first))
    stage.client.collect()
    stage.post(num_tokens=9)
    stage.line.due(TransportError("gone"))
    stage.client.collect()
    stage.line = stage.new_worker(2)
    stage.knows()
    stage.post(num_tokens=10)
    again = dataclasses.replace(first, idle_s=1.0, cache_bytes=5)
    stage.line.due(answer(stage.line.sent[-1].number, stats=again))
    stage.client.collect()
    assert (stage.stats.draft_idle_s, stage.stats.wasted, stage.stats.cache_bytes) == (3.0, 60, 5)


# -- what is told ahead ------------------------------------------------------------------------------------------------


def told(number: int, *, num_tokens: int, recovery: int = 4, drafts: tuple[int, ...] = (5, 6, 7)) -> Foreseen:
    """Guesses for sequence 1: none accepted and then `recovery`."""
    padded = [*drafts, *[0] * (DEPTH - len(drafts))]
    entries = [1, 8, 1, 9, 0, 0, 0, recovery, len(drafts), *padded]
    return Foreseen(number=number, lookahead=DEPTH, seq_ids=[1], num_tokens=[num_tokens], counts=[2], entries=entries)


def looked_up(stage: Stage, num_tokens: int) -> bool:
    """Sequence 1 gains the token 4 and has `num_tokens` then."""
    outcome = VerificationOutcome(1, 0, 4)
    settled = settle(stage, [Update(outcome=outcome, num_tokens_before=num_tokens - 1, new_tokens=[4])])
    stage.post(num_tokens=num_tokens)
    return settled


def settle(stage: Stage, steps: list[Update]) -> bool:
    """Looks twice, as whoever practises does: only what is noted counts."""
    looked = stage.client.look_up(steps)
    assert stage.client.look_up(steps) == looked
    stage.client.note(looked)
    return looked.is_settled


def test_an_outcome_that_was_told_ahead_waits_for_no_answer(stage: Stage) -> None:
    stage.answered()
    stage.line.due(told(1, num_tokens=8))
    assert looked_up(stage, 9)
    stage.line.waits.clear()
    stage.client.collect()
    assert stage.line.waits == []
    offer = stage.client.take(sequence(9))
    assert offer is not None
    assert (offer.tokens, offer.source, offer.looked_up) == ([5, 6, 7], Source.HIT, True)
    stage.line.due(answer(2))  # says the same; it makes no second offer, and nothing is counted twice
    assert not looked_up(stage, 10)
    assert (stage.stats.lookups, stage.stats.hits, stage.stats.wasted) == (2, 2, 0)
    assert stage.link.reports == []


@pytest.mark.parametrize(
    ("num_tokens", "recovery"), [(7, 4), (9, 4), (8, 3)], ids=["of a step ago", "of a step to come", "another token"]
)
def test_what_was_told_of_another_outcome_is_no_offer(stage: Stage, num_tokens: int, recovery: int) -> None:
    stage.answered()
    stage.client.take(sequence(8))
    stage.line.due(told(1, num_tokens=num_tokens, recovery=recovery))
    assert not looked_up(stage, 9)
    assert stage.client.take(sequence(9)) is None
    stage.line.due(answer(2))
    stage.client.collect()
    assert stage.client.take(sequence(9)) is not None


def test_guesses_that_come_while_the_answer_is_waited_for_end_the_wait(stage: Stage) -> None:
    stage.answered()
    assert not looked_up(stage, 9)
    stage.line.due(told(1, num_tokens=8, drafts=(5, 6)), after_s=0.002)
    stage.line.due(answer(2), after_s=0.5)
    stage.client.collect()
    offer = stage.client.take(sequence(9))
    assert offer is not None
    assert offer.tokens == [5, 6]
    assert stage.clock.now < 1000.1


def test_what_is_told_of_a_sequence_that_was_released_is_forgotten(stage: Stage) -> None:
    stage.answered()
    stage.client.release([1])
    stage.line.due(told(1, num_tokens=8))
    stage.client.look_up([])
    assert len(stage.client._ahead) == 0


def test_a_worker_has_slack_when_it_idles_in_every_round(stage: Stage) -> None:
    assert not stage.client.has_slack
    for idle_s, expected in ((0.0, False), (0.004, True), (0.008, True)):
        stats = WorkerStats(idle_s=idle_s)
        stage.answered()
        stage.line.due(dataclasses.replace(told(len(stage.line.sent), num_tokens=8), stats=stats))
        stage.client.look_up([])
        assert stage.client.has_slack == expected


@pytest.mark.parametrize(
    "changes",
    [{"number": 9}, {"number": 0}, {"lookahead": 2}, {"counts": [1]}, {"entries": [0, 4, 3, 5, 6, VOCAB] * 2},
     {"entries": [0, 4, DEPTH + 1, 5, 6, 7] * 2}],
)  # fmt: skip
def test_guesses_that_do_not_fit_end_the_worker(stage: Stage, changes: dict[str, Any]) -> None:
    stage.answered()
    stage.line.due(dataclasses.replace(told(1, num_tokens=8), **changes))
    assert not looked_up(stage, 9)
    assert len(stage.link.reports) == 1
    assert stage.client.take(sequence(9)) is None


def test_listening_ends_with_the_guesses_or_with_its_time(stage: Stage) -> None:
    stage.answered()
    stage.post(num_tokens=9)
    stage.line.due(answer(2), after_s=0.001)
    stage.line.due(told(2, num_tokens=9), after_s=0.003)
    stage.line.due(answer(3), after_s=0.004)
    began = stage.clock.now
    stage.client.listen(began + 1.0)
    assert stage.clock.now - began == pytest.approx(0.003)
    stage.line.waits.clear()
    stage.client.listen(began + 1.0)
    assert stage.line.waits == [], "all is known"
    stage.post(num_tokens=10)
    stage.line._due.clear()
    stage.client.listen(stage.clock.now + 0.25)
    assert stage.line.waits == [pytest.approx(0.25)]
    assert stage.link.reports == []


def test_a_prompt_that_is_read_in_time_has_drafts_at_once_and_another_is_not_waited_for(stage: Stage) -> None:
    """The first outcome of sequence 2 was foreseen when it came; the worker still reads the prompt of sequence 3."""
    for seq_id in (2, 3):
        attach = Attach(
            seq_id=seq_id, token_ids=[5] * 8, num_prompt_tokens=8, sampling=SamplingParams(), seed=0,
            stop_ids=frozenset(),
        )  # fmt: skip
        stage.client.expect([attach])
    assert [request.updates for request in stage.line.sent] == [[], []]
    stage.line.due(dataclasses.replace(told(1, num_tokens=8), seq_ids=[2]))
    first = [Update(outcome=VerificationOutcome(i, 0, 4), num_tokens_before=8, new_tokens=[4]) for i in (2, 3)]
    assert settle(stage, first), "nobody to wait for"
    assert (stage.stats.lookups, stage.stats.hits) == (1, 1)
    stage.client.post([], first, {2: Asked(9, True), 3: Asked(9, True)})
    stage.client.collect()
    assert stage.line.waits == [0.0] * 5, "what lay there was taken, by the prompts and by the look-ups"
    offer = stage.client.take(sequence(9, seq_id=2))
    assert offer is not None
    assert offer.source is Source.HIT
    assert stage.client.take(sequence(9, seq_id=3)) is None
    again = [Update(outcome=VerificationOutcome(i, 0, 4), num_tokens_before=9, new_tokens=[4]) for i in (2, 3)]
    assert not settle(stage, again), "from now on both are as any other"


@pytest.mark.parametrize("comes", [False, True])
def test_listening_goes_on_until_the_verdict_is_there(stage: Stage, comes: bool) -> None:
    """What comes after the time to wait, but before the verdict, need not be read when that is there."""

    class Verdict:
        looks = 0

        def is_there(self) -> bool:
            self.looks += 1
            if comes and self.looks == 2:
                stage.line.due(told(2, num_tokens=9))
            return self.looks == 4

        def rows(self) -> list[list[int]]:
            raise AssertionError("nobody waits for it here")

    stage.answered()
    stage.post(num_tokens=9)
    stage.line.due(answer(2))
    stage.line.waits.clear()
    verdict = Verdict()
    stage.client.listen(stage.clock.now + 0.25, verdict)
    assert verdict.looks == (2 if comes else 4)
    assert stage.line.waits == [*[pytest.approx(0.25)] * 2, *[0.0] * (2 if comes else 3)]
    assert (stage.client._told == 2) is comes


@pytest.mark.parametrize(("worth_from", "settled"), [(1, False), (2, True)])
def test_a_miss_that_nobody_would_draft_for_is_not_waited_for(stage: Stage, worth_from: int, settled: bool) -> None:
    stage.answered()
    stage.client.take(sequence(8))
    stage.line.due(dataclasses.replace(told(1, num_tokens=8, recovery=3), worth_from=worth_from))
    assert looked_up(stage, 9) is settled
    assert stage.client.take(sequence(9)) is None
    assert (stage.stats.lookups, stage.stats.hits) == (1 + settled, 1)
    stage.line.due(answer(2, drafts=[[]], sources=[Source.DECLINED]))
    stage.client.look_up([])
    assert (stage.stats.lookups, stage.stats.hits, stage.link.reports) == (2, 1, [])


class There:
    """A verdict that is there already."""

    def is_there(self) -> bool:
        return True

    def rows(self) -> list[list[int]]:
        return []


@pytest.mark.parametrize("foreseeable", [True, False])
def test_nobody_listens_for_what_cannot_be_told_ahead(stage: Stage, foreseeable: bool) -> None:
    """Of rows that are drawn nothing is: their step must not be kept from what follows it."""
    stage.answered(8)
    began = stage.clock.now
    outcome = VerificationOutcome(1, 0, 4)
    update = Update(outcome=outcome, num_tokens_before=8, new_tokens=[4])
    stage.client.post([], [update], {1: Asked(9, True, foreseeable=foreseeable)})
    stage.client.listen(began + 0.5, There())
    assert (stage.clock.now > began + 0.4) is foreseeable


def test_a_pause_is_no_time_that_an_answer_took(stage: Stage) -> None:
    """The answer to the last words lies there while nobody asks for anything; the next prompt comes a minute later."""
    for num_tokens in range(8, 20):
        stage.answered(num_tokens)
    stage.client.release([1])
    for seq_id in range(2, 14):
        stage.line.due(answer(stage.line.sent[-1].number, seq_ids=[], sources=[], drafts=[], has_law=[]))
        stage.clock.now += 60.0
        prompt = Attach(
            seq_id=seq_id, token_ids=[3] * 5, num_prompt_tokens=5, sampling=SamplingParams(), seed=0,
            stop_ids=frozenset(),
        )  # fmt: skip
        stage.client.expect([prompt])
        stage.line.due(answer(stage.line.sent[-1].number, seq_ids=[seq_id]))
        stage.client.look_up([])
        stage.client.release([seq_id])
    stage.knows(99)
    stage.line.waits.clear()
    stage.post(99, num_tokens=9)
    stage.client.collect()
    assert 0.0 < max(stage.line.waits) < 0.9
