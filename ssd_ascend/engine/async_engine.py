"""The engine as the HTTP front end sees it: starts the process, sends it tokens, streams text back, notices its death.

Text work (detokenizing, stop strings) happens here, in the front end's process, so that it never steals the step loop's
interpreter. Used by `ssd_ascend/serve`. Lives in one asyncio loop; nothing here may be called from another thread.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.admission import admit
from ssd_ascend.engine.answer_stream import AnswerStream
from ssd_ascend.engine.answers import AnswerDelta
from ssd_ascend.engine.breathing import breathing
from ssd_ascend.engine.identity import EngineInfo, EngineLimits
from ssd_ascend.engine.messages import Abort, Failed, Progress, Ready, Rejected, Report, Stats, Stepped, Submit, Tune
from ssd_ascend.engine.outputs import OutputProcessor
from ssd_ascend.engine.process_link import ENGINE_COMMAND, ProcessLink
from ssd_ascend.engine.step_watch import StepWatch, usual_limit_s
from ssd_ascend.errors import RequestError, SsdError, WorkerError
from ssd_ascend.log import get_logger
from ssd_ascend.text.detokenizer import TokenBytes

log = get_logger(__name__)

_FIRST_STAGE = "starting"
_GOODBYE_S = 10.0
_GOODBYE_UNREADY_S = 0.1
"""An engine that still loads does not listen."""


class State(enum.StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class Loss(enum.StrEnum):
    """How an engine was lost: it never was ready, it died later, or it was stuck in a step and we ended it."""

    START = "start"
    DEATH = "death"
    STUCK = "stuck"


class EngineUnavailableError(SsdError):
    """There is no engine to serve a request: it is starting, stopping or dead. The server answers 503."""


class AsyncEngine:
    """One engine process and the requests under way in it."""

    def __init__(
        self,
        link: ProcessLink,
        config: EngineConfig,
        tokenizer: TokenBytes,
        command: Sequence[str],
        step_timeout_s: float | None,
    ) -> None:
        self.config = config
        self.state = State.STARTING
        self.failure: str | None = None
        self.progress = Progress(_FIRST_STAGE)
        self.limits: EngineLimits | None = None
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self._degraded: str | None = None
        self.on_delta: Callable[[AnswerDelta], None] | None = None
        """Called with every delta, for metrics."""
        self.tuned: Tune | None = None
        """What `tune` last asked for, if anything."""
        self.keeps_unstarted = False
        """Whether requests without a token outlive the engine, for the next one; `restart` must then follow."""
        self.on_loss: Callable[[Loss], None] | None = None
        """Called for every engine that is lost, for metrics."""
        self._last_words: str | None = None
        """Why the engine of now is ending, where it said so; `failure` may be about the one before it."""
        self._link = link
        self._unstarted: dict[int, EngineRequest] = {}
        self._retried: set[int] = set()
        self._processor = OutputProcessor(tokenizer, seed=config.seed)
        self._streams: dict[int, tuple[AnswerStream, int]] = {}
        self._announced = 0
        """Answers of requests that are being submitted."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._command = command
        self._step_timeout_s = step_timeout_s
        self._watch = StepWatch(math.inf if step_timeout_s is None else step_timeout_s)
        self._loss = Loss.START
        """How the engine of now would be lost."""
        self._reading = asyncio.create_task(self._read(link))

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        tokenizer: TokenBytes,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        step_timeout_s: float | None = math.inf,
    ) -> AsyncEngine:
        """Start the engine process and return at once; `wait_until_started` says how that went.

        command: see `ProcessLink.open`. step_timeout_s: an engine that has been ready and ends no step for so long,
        though it has work, is killed, and as lost as one that died; None: see `usual_limit_s`.
        """
        return cls(await ProcessLink.open(command, config), config, tokenizer, command, step_timeout_s)

    async def restart(self) -> None:
        """Start another engine process in place of the one that died; requests it had not begun go to the new one.

        How that went is told by `state`, which is FAILED again at once where there can be no process.
        """
        assert self.state is State.FAILED
        self.progress, self.limits, self._degraded, self.stats = Progress("restarting"), None, None, EngineStats()
        self._last_words, self._loss = None, Loss.START
        try:
            self._link = await ProcessLink.open(self._command, self.config)
        except WorkerError as error:
            self.failure = str(error)
            self._note_loss()
            return
        self._enter(State.STARTING)
        self._reading = asyncio.create_task(self._read(self._link))
        if self.tuned is not None:
            self._tell(self.tuned)
        if self._unstarted:
            self._tell(Submit(list(self._unstarted.values())))

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._link.pid

    @property
    def degraded(self) -> str | None:
        """Why the engine serves slower than it should, if it does, or what else is of concern."""
        return self._watch.worry or self._degraded

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return self._processor.num_requests

    @property
    def num_sequences(self) -> int:
        """Answers under way or queued, or about to be."""
        return self._processor.num_sequences + self._announced

    async def wait_until_loading(self) -> None:
        """Return when the engine has its device and begins to load, or is beyond that, or will never be there."""
        while self.state is State.STARTING and self.progress.stage == _FIRST_STAGE:
            await self._changed.wait()

    async def wait_until_started(self) -> None:
        """Return when the engine is ready. Raises WorkerError, with the engine's own sentence, when it failed."""
        await self.wait_for_change(State.STARTING)
        if self.state is State.FAILED:
            raise WorkerError(self.failure or "the engine failed")

    async def wait_for_change(self, state: State) -> None:
        """Return when the engine is in another state than `state`."""
        while self.state is state:
            await self._changed.wait()

    def _enter(self, state: State) -> None:
        self.state = state
        self._wake()

    def _wake(self) -> None:
        """Let everybody look who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # -- requests ----------------------------------------------------------------------------------------------------

    def require_ready(self) -> EngineLimits:
        """The engine's limits. Raises EngineUnavailableError when there is no engine to take a request."""
        if self.state is not State.READY or self.limits is None:
            reason = {
                State.STARTING: "the engine is still starting",
                State.STOPPING: "the server is shutting down",
            }.get(self.state, self.failure or "the engine failed")
            raise EngineUnavailableError(reason)
        return self.limits

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, continuation: bool = False
    ) -> AnswerStream:
        """Submit one request of one or more prompts. Raises RequestError or EngineUnavailableError, after which nothing
        of it runs. `continuation`: the text goes on from the prompt's (completions), instead of starting anew (chat).

        Of many prompts, others are seen to every few, so the engine may be lost in between.
        """
        limits = self.require_ready()
        total = len(prompts) * sampling.n
        stream = AnswerStream(total, self._cancel)
        self._announced += total
        try:
            admitted = [admit(prompt, sampling, limits) async for prompt in breathing(prompts)]
            async for number, (prompt, own) in breathing(enumerate(zip(prompts, admitted, strict=True))):
                self.require_ready()
                self._submit(stream, number * sampling.n, prompt, own, continuation=continuation)
                self._announced -= sampling.n
                total -= sampling.n
        except BaseException:
            self._cancel(stream)
            raise
        finally:
            self._announced -= total
        return stream

    def _submit(
        self, stream: AnswerStream, first: int, prompt: Sequence[int], sampling: SamplingParams, *, continuation: bool
    ) -> None:
        """Send one prompt; `first` is the number of its first answer in the stream."""
        request_id, requests = self._processor.add(prompt, sampling, continuation=continuation)
        self._streams[request_id] = (stream, first)
        self._unstarted.update({request.id: request for request in requests})
        self._tell(Submit(requests))
        self._idle.clear()

    def _cancel(self, stream: AnswerStream) -> None:
        """Abort what still runs of a stream; nothing when it has ended."""
        ours = [request_id for request_id, (owner, _) in self._streams.items() if owner is stream]
        abort = [seq_id for request_id in ours for seq_id in self._processor.cancel(request_id)]
        for request_id in ours:
            del self._streams[request_id]
        self._forget_starts(abort)
        if abort:
            self._tell(Abort(abort))
        self._note_idle()

    def _deliver(self, deltas: Sequence[AnswerDelta]) -> None:
        for delta in deltas:
            if self.on_delta is not None:
                self.on_delta(delta)
            stream, first = self._streams[delta.request_id]
            stream.put(replace(delta, index=first + delta.index) if first else delta)
        for delta in deltas:
            if delta.finish_reason is not None and not self._processor.is_open(delta.request_id):
                self._streams.pop(delta.request_id, None)
        self._note_idle()

    def _forget_starts(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._unstarted.pop(seq_id, None)
            self._retried.discard(seq_id)

    def tune(self, lookahead: int, fan_out: Sequence[int] = ()) -> None:
        """See `Engine.tune`; takes effect between two steps, and again when the engine is restarted."""
        self.require_ready()
        before = [] if self.tuned is None else self.tuned.fan_out
        self.tuned = Tune(lookahead, list(fan_out) or before)
        self._tell(self.tuned)

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # -- the line to the engine process --------------------------------------------------------------------------------

    def _tell(self, command: Submit | Abort | Tune) -> None:
        self._link.send(command)
        self._watch.asked()

    async def _read(self, link: ProcessLink) -> None:
        watching: asyncio.Task[None] | None = None
        try:
            async for report in link.reports():
                self._take(report)
                self._watch.heard(has_work=self.num_requests > 0 or self.stats.running + self.stats.waiting > 0)
                if watching is None and self.limits is not None:  # what comes before, loading, takes its time
                    watching = asyncio.create_task(self._end_when_stuck(link))
        except Exception as error:
            log.exception("cannot go on with what the engine sent")
            self._last_words = f"the front end cannot go on with what the engine sent: {type(error).__name__}: {error}"
        finally:
            if watching is not None:
                watching.cancel()
        await self._bury(link)

    async def _end_when_stuck(self, link: ProcessLink) -> None:
        """Kill the process once it ends no step any more; `_read` then sees its line end, as that of any that dies."""
        await self._watch.wait_until_stuck()
        self._last_words = f"the engine was stuck: it had work, and ended no step for {self._watch.limit_s:g} s"
        self._loss = Loss.STUCK
        await link.kill()

    def _take(self, report: Report) -> None:
        match report:
            case Stepped(deltas):
                self._forget_starts(delta.seq_id for delta in deltas)
                processed = self._processor.process(deltas)
                if processed.abort:
                    self._tell(Abort(processed.abort))
                self._deliver(processed.deltas)
            case Stats(stats, degraded):
                self.stats, self._degraded = stats, degraded
            case Rejected(seq_id, message, param, code):
                self._forget_starts([seq_id])
                self._deliver(self._processor.refuse(seq_id, RequestError(message, param=param, code=code)))
            case Progress():
                self.progress = report
                self._wake()
            case Ready(limits, info):
                self.limits, self.info, self.failure, self._loss = limits, info, None, Loss.DEATH
                self._retried.update(self._unstarted)  # once: what kills one engine would kill the next
                if self._step_timeout_s is None:
                    self._watch.limit_s = usual_limit_s(info.device)
                if self.state is State.STARTING:  # or a signal came first
                    self._enter(State.READY)
            case Failed(message):
                self._last_words = message

    async def _bury(self, link: ProcessLink) -> None:
        """The engine process has ended: every open answer gets an error now, and no new one is taken."""
        link.hang_up()
        if not self._closing:
            ending = await link.ending()
            self.failure = self._last_words or f"the engine process {ending}"
            if self.state is not State.STARTING:  # a failed start is told to who waits for it
                log.error("%s", self.failure)
            if where := link.where():
                log.error("where the engine was:\n%s", where)
            self._note_loss()
            self._enter(State.FAILED)
        if self._closing or not self.keeps_unstarted:
            self.fail_all()
        else:
            kept = self._unstarted.keys() - self._retried
            self._fail(self._processor.seq_ids - kept)

    def _note_loss(self) -> None:
        if self.on_loss is not None:
            self.on_loss(self._loss)

    def fail_all(self) -> None:
        """End every request under way with the reason there is."""
        self._fail(self._processor.seq_ids)

    def _fail(self, seq_ids: Iterable[int]) -> None:
        gone = sorted(seq_ids)
        self._forget_starts(gone)
        self._deliver(self._processor.fail(self.failure or "the server is shutting down", gone))

    # -- the end -----------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Take no new request from now on; those under way go on, unless they wait for an engine that will not come."""
        self.keeps_unstarted = False
        if self.state in (State.READY, State.STARTING):
            self._enter(State.STOPPING)
        elif self.state is State.FAILED:
            self.fail_all()

    async def drain(self, timeout_s: float) -> None:
        """Wait for the requests under way; those that are not done in time end with an error."""
        self.stop_accepting()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("%d requests were not done within %g s of shutting down", self.num_requests, timeout_s)
            self.end_all()

    def end_all(self) -> None:
        """End every request under way with an error."""
        gone = self._processor.seq_ids
        self._forget_starts(gone)
        self._deliver(self._processor.fail("the server is shutting down", gone))

    async def close(self) -> None:
        """End the engine process: asked first, killed when it does not answer."""
        self._closing = True
        self.stop_accepting()
        await self._link.close(_GOODBYE_S if self.limits else _GOODBYE_UNREADY_S)
        await self._reading
