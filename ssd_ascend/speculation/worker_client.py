"""The target's end of the line to a draft worker: requests go out, offers come in, and trouble costs speed only.

An outcome that the worker foresaw, and told ahead, is looked up here; for the others there is an answer to wait for.
A worker that is slow is waited for briefly, then polled; one that is silent, gone or talks nonsense is given up, and
the link brings another. Used by the `ssd` speculator.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from ssd_ascend.core.batch import Awaited
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, VerificationOutcome
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.errors import TransportError
from ssd_ascend.speculation.answer_check import check_answer
from ssd_ascend.speculation.offers import Asked, LookedUp, Offer, Step
from ssd_ascend.speculation.pulse import Pulse
from ssd_ascend.speculation.recent import Recent
from ssd_ascend.speculation.told_ahead import ToldAhead
from ssd_ascend.speculation.workers import Worker, WorkerLink
from ssd_ascend.transport.messages import Answer, Attach, Foreseen, Request, Update, WorkerStats

_PATIENCE_MOST_S = 1.0
_PATIENCE_LEAST_S = 0.05
_PATIENCE_FACTOR = 4.0
"""A step waits this many times as long as answers usually take, then goes on without: a worker that reads somebody's
long prompt must not hold up everybody else. Until an answer came back, the next one is only polled for."""
_BUSY_FACTOR = 6.0
"""A worker that computes may be silent for so many times longer than one that does not."""
_SLACK_S = 1e-3
"""A worker that idles for longer in every round can be told of a step a little later."""


class _Unanswered(NamedTuple):
    """A request that has no answer yet: when it went out, and sequences whose drafts were told ahead of it."""

    posted_s: float
    found: set[int]


class WorkerClient:
    """Talks to whatever worker is in service. Writes what only it can know into `stats`."""

    def __init__(
        self, link: WorkerLink, stats: SpeculationStats, *, target_vocab: int, lookahead: int, silence_s: float
    ) -> None:
        self.attached: set[int] = set()
        """Sequences the worker in service knows."""
        self._fan_out: list[int] = []
        """Guesses per accepted length that every worker is told; empty: those it was built with."""
        self._told_fan_out: list[int] = []
        self.stats = stats
        self._link = link
        self._target_vocab = target_vocab
        self._lookahead = lookahead
        self._silence_s = silence_s
        self._worker: Worker | None = None
        self._released: list[int] = []
        self._asked: Mapping[int, Asked] = {}
        self._offers: dict[int, Offer] = {}
        self._number = 0
        self._answered = 0
        self._is_late = False
        """The answer was waited for in vain; so it is polled for, until the worker is heard of again."""
        self._last_heard_s = 0.0
        self._pulse = Pulse()
        self._unanswered: dict[int, _Unanswered] = {}
        """By the number of the request."""
        self._ahead = ToldAhead(target_vocab=target_vocab, lookahead=lookahead)
        self._found: set[int] = set()
        """Sequences of this step whose drafts were told ahead."""
        self._open: dict[int, Step] = {}
        """Outcomes of this step that nothing is known for yet, by sequence."""
        self._expected: set[int] = set()
        """Sequences whose prompts the worker may still be reading: nobody waits for their first drafts."""
        self._idle_s, self._idle_before_s = Recent(), 0.0
        self._told = 0
        """The last request whose round was told ahead."""
        self._usual_s = Recent()
        self._stale = 0
        self._now = WorkerStats()
        self._before = WorkerStats()

    # -- what the speculator does --------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """True when a worker is in service. A new one knows no sequence yet."""
        worker = self._link.current()
        if worker is not None and (self._worker is None or worker.generation != self._worker.generation):
            self._start_over()
            self._worker = worker
        elif worker is None and self._worker is not None:
            self._start_over()
        self.stats.worker_alive = worker is not None
        self.stats.worker_restarts = self._link.restarts
        return self._worker is not None

    def tune(self, fan_out: Rows[int]) -> None:
        """Tell the worker in service, and those after it, for how many guesses to prepare."""
        self._fan_out = list(fan_out)

    @property
    def to_target(self) -> torch.Tensor | None:
        """The target id of every draft id, None when the vocabularies are one."""
        return None if self._worker is None else self._worker.hello.to_target

    def expect(self, attaches: list[Attach]) -> None:
        """Have the worker read these prompts while the target reads them, and foresee the first token."""
        self._drain()  # answers that lay here while nobody asked for anything
        self.post(attaches, [], {attach.seq_id: Asked(len(attach.token_ids), looked_up=False) for attach in attaches})
        self._expected.update(self.attached.intersection(attach.seq_id for attach in attaches))

    def look_up(self, steps: Rows[Step]) -> LookedUp:
        """What was told ahead of these outcomes. Nothing comes of it before `note`."""
        if self._told < self._number or self._answered < self._number:
            self._drain()
        return self._known(steps)

    def note(self, looked: LookedUp) -> None:
        """Before `post`, with the same steps: those looked up get their drafts, and the others are open."""
        self._found = set()
        self._open = {step.outcome.seq_id: step for step in looked.steps}
        self._settle(looked, self._found)

    def foretold(self, seq_id: int) -> VerificationOutcome | None:
        """Some outcome that the worker has drafts for."""
        return self._ahead.some_outcome(seq_id)

    def _known(self, steps: Rows[Step]) -> LookedUp:
        drafts, missing = dict[int, list[int]](), list[Step]()
        for step in steps:
            outcome = step.outcome
            own = self._ahead.look_up(outcome, step.num_tokens_before)
            if own is None:
                missing.append(step)
            else:
                drafts[outcome.seq_id] = own
        return LookedUp(steps, drafts, self._declined(missing) if missing else set())

    def _declined(self, missing: Rows[Step]) -> set[int]:
        """Who is new gets nothing yet; nor does anybody else, where all were told ahead and too few missed."""
        new = self._expected.intersection(step.outcome.seq_id for step in missing)
        others = [step for step in missing if step.outcome.seq_id not in new]
        known = (self._ahead.knows(step.outcome.seq_id, step.num_tokens_before) for step in others)
        if len(others) < self._ahead.worth_from and all(known):
            return new.union(step.outcome.seq_id for step in others)
        return new

    def _settle(self, looked: LookedUp, found: set[int]) -> None:
        """Make offers of what was looked up; notes in `found` for whom there is nothing to wait."""
        for seq_id, drafts in looked.drafts.items():
            step = self._open.pop(seq_id)
            length = step.num_tokens_before + len(step.new_tokens)
            self._offers[seq_id] = Offer(length, Source.HIT, drafts, None, looked_up=True)
        for seq_id in looked.declined:
            del self._open[seq_id]
        found.update(looked.drafts, looked.declined)
        self.stats.lookups += len(looked.drafts) + len(looked.declined - self._expected)
        self.stats.hits += len(looked.drafts)
        self._expected -= looked.declined

    @property
    def has_slack(self) -> bool:
        """True when the worker is usually done long before it hears of the next step."""
        idle_s = self._idle_s.typical
        return idle_s is not None and idle_s > _SLACK_S

    @property
    def reads_features(self) -> bool:
        """See `Hello.reads_features`; of the worker in service."""
        return self._worker is not None and self._worker.hello.reads_features

    def post(self, attaches: list[Attach], updates: list[Update], asked: Mapping[int, Asked]) -> None:
        """Send the outcomes of a step; the worker answers for every sequence in `asked`."""
        found, self._found = self._found, set()
        if self._worker is None or not (attaches or updates or self._released):
            return
        self._open = {u.outcome.seq_id: u for u in updates if u.outcome.seq_id not in found}
        if self._answered == self._number:
            self._last_heard_s = time.monotonic()
        released, self._released = self._released, []
        self._number += 1
        self._asked = asked
        self._unanswered[self._number] = _Unanswered(time.monotonic(), found)
        fan_out = [] if self._fan_out == self._told_fan_out else self._fan_out
        self._told_fan_out = self._fan_out
        try:
            self._worker.transport.send(
                Request(number=self._number, released=released, attaches=attaches, updates=updates, fan_out=fan_out)
            )
        except TransportError as error:
            self._lose(str(error))
            return
        self.attached.update(attach.seq_id for attach in attaches)
        if not any(one.foreseeable for one in asked.values()):
            self._told = self._number  # there is nothing to hear before the answer

    def collect(self) -> None:
        """Take the answer to the last request, waiting a little where that is worth it."""
        if self._worker is None or self._answered == self._number or not self._open:
            return
        start = time.perf_counter()
        try:
            while self._answered < self._number and self._open:
                message = self._worker.transport.recv(0.0 if self._is_late else self._patience_s)
                if message is None:
                    self._note_silence()
                    break
                self._accept(message)
        except TransportError as error:
            self._lose(str(error))
        self.stats.target_wait_s += time.perf_counter() - start

    def listen(self, until_s: float, verdict: Awaited | None = None) -> None:
        """While there is nothing else to do: take in what comes, up to the guesses of the last request's round. Up to
        that moment of `time.monotonic` by waiting for it, then by looking for it and for the verdict in turn."""
        try:
            while self._worker is not None and self._told < self._number:
                message = self._worker.transport.recv(max(0.0, until_s - time.monotonic()))
                if message is not None:
                    self._accept(message)
                elif verdict is None or verdict.is_there():
                    return
        except TransportError as error:
            self._lose(str(error))

    def _drain(self) -> None:
        """Take what lies there."""
        try:
            while self._worker is not None and (message := self._worker.transport.recv(0.0)) is not None:
                self._accept(message)
        except TransportError as error:
            self._lose(str(error))

    @property
    def _patience_s(self) -> float:
        """What is left of the time that the answer may take."""
        usual_s = self._usual_s.typical
        if usual_s is None:
            return _PATIENCE_MOST_S
        patience_s = min(_PATIENCE_MOST_S, max(_PATIENCE_LEAST_S, _PATIENCE_FACTOR * usual_s))
        return max(0.0, self._unanswered[self._number].posted_s + patience_s - time.monotonic())

    def take(self, seq: Sequence) -> Offer | None:
        """The offer for `seq` as it stands now, if there is one."""
        offer = self._offers.pop(seq.id, None)
        return offer if offer is not None and offer.num_tokens == seq.num_tokens else None

    def release(self, seq_ids: Iterable[int]) -> None:
        """The worker hears of it with the next request; at once, when it holds nothing else and none may follow."""
        for seq_id in seq_ids:
            self._offers.pop(seq_id, None)
            self._open.pop(seq_id, None)
            self._expected.discard(seq_id)
            self._ahead.forget([seq_id])
            if seq_id in self.attached:
                self.attached.discard(seq_id)
                self._released.append(seq_id)
        if self._released and not self.attached:
            self.post([], [], {})

    def health(self) -> str | None:
        """See `Speculator.health`."""
        self.stats.worker_alive = self._link.current() is not None
        self.stats.worker_restarts = self._link.restarts
        return self._link.health()

    def close(self) -> None:
        """End the worker."""
        self._link.close()

    # -- answers -------------------------------------------------------------------------------------------------

    def _accept(self, message: object) -> None:
        self._last_heard_s = time.monotonic()
        self._is_late = False  # it is awake, so the answer that is due deserves a wait
        if isinstance(message, Foreseen):
            self._accept_foreseen(message)
            return
        if not isinstance(message, Answer):
            raise TransportError(f"the worker sent a {type(message).__name__} where an answer was due")
        assert self._worker is not None
        check_answer(
            message, after=self._answered, last=self._number, asked=self._asked, lookahead=self._lookahead,
            target_vocab=self._target_vocab, draft_vocab=self._worker.hello.draft_vocab,
        )  # fmt: skip
        self._answered = message.number
        posted_s, found = self._unanswered[message.number]
        if self._open or message.number < self._number:  # else nobody waited, and it lay here for a while
            self._usual_s.add(self._last_heard_s - posted_s)
        for number in [number for number in self._unanswered if number <= message.number]:
            del self._unanswered[number]
        self._count(message.stats)
        if message.number < self._number:  # every sequence has moved on
            drafted = zip(message.seq_ids, message.drafts, strict=True)
            self._stale += sum(len(drafts) for seq_id, drafts in drafted if seq_id not in found)
            return
        self._open.clear()
        self._offer(message, found)

    def _accept_foreseen(self, message: Foreseen) -> None:
        if not 0 < message.number <= self._number:
            raise TransportError(f"the worker foresaw round {message.number}, the last one was {self._number}")
        self._count(message.stats)
        self._idle_s.add(message.stats.idle_s - self._idle_before_s)
        self._idle_before_s = message.stats.idle_s
        self._told = max(self._told, message.number)
        self._expected.difference_update(message.seq_ids)
        self._ahead.take_in(message, self.attached)
        if self._open and self._number in self._unanswered:
            self._settle(self._known(list(self._open.values())), self._unanswered[self._number].found)

    def _offer(self, message: Answer, found: Container[int]) -> None:
        """Offers from the answer to the last request, but for those that were told ahead."""
        law_row = 0
        for i, seq_id in enumerate(message.seq_ids):
            asked, drafts, source = self._asked[seq_id], message.drafts[i], Source(message.sources[i])
            law = None
            if message.has_law[i]:
                assert message.law is not None
                law = message.law[law_row, : len(drafts)]
                law_row += 1
            if seq_id in found:
                continue
            if seq_id in self.attached:
                self._offers[seq_id] = Offer(asked.num_tokens, source, drafts, law, asked.looked_up)
            self.stats.lookups += asked.looked_up
            self.stats.hits += source is Source.HIT

    def _note_silence(self) -> None:
        self._is_late = True
        silent_s = time.monotonic() - self._last_heard_s
        is_working = self._pulse.beats(time.monotonic(), self._link.work_s)
        allowed_s = _BUSY_FACTOR * self._silence_s if is_working else self._silence_s
        if silent_s > allowed_s:
            self._lose(f"no answer for {silent_s:.1f} s")

    def _lose(self, reason: str) -> None:
        assert self._worker is not None
        self._link.report(self._worker.generation, reason)
        self._start_over()
        self.stats.worker_alive = False

    def _start_over(self) -> None:
        """Nothing is known of the worker that comes next."""
        self._worker = None
        self._told_fan_out = []
        self.attached.clear()
        self._released.clear()
        self._offers.clear()
        self._unanswered.clear()
        self._open.clear()
        self._expected.clear()
        self._ahead.clear()
        self._usual_s = Recent()
        self._idle_s, self._idle_before_s = Recent(), 0.0
        self._answered = self._told = self._number
        self._is_late = False
        self._before = self._before + self._now
        self._now = WorkerStats()

    def _count(self, now: WorkerStats) -> None:
        self._now = now
        total = self._before + self._now
        self.stats.draft_idle_s = total.idle_s
        self.stats.wasted = total.cached_drafts - total.used_drafts + self._stale
        self.stats.cache_bytes = now.cache_bytes
