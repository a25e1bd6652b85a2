"""Keeps one draft worker process alive: a `WorkerLink` for the `ssd` speculator.

One thread starts the worker, waits for its hello, watches it, ends it when it is reported, and starts the next one
after a pause that doubles. The step loop only reads what the thread has found; it never waits for it.
"""

from __future__ import annotations

import contextlib
import enum
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ssd_ascend import trace
from ssd_ascend.core.exit_status import how_it_ended
from ssd_ascend.errors import SsdError, TransportError, in_one_line
from ssd_ascend.log import fields, get_logger
from ssd_ascend.speculation import worker_process
from ssd_ascend.speculation.workers import START_TIMEOUT_S, Worker
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.link import DEFAULT_KIND, Link, make_link
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello, Message, Shutdown

_POLL_S: Final = 0.05
"""How soon the thread sees an exit; the step loop sees the end of the line at once."""
_EXIT_PATIENCE_S: Final = 5.0
"""A worker that hung up while starting is given this to exit, so that the log can say how it ended."""
_DEATH_S: Final = 10.0
"""How long we wait for one that was killed: a device that hangs may hold it for ever."""

log = get_logger(__name__)


class WorkerState(enum.StrEnum):
    """For `/health` and metrics."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    """Waiting to start the next one."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient the supervisor is. Seconds."""

    first_pause_s: float = 0.5
    """Before the first restart; doubles with each that follows."""
    longest_pause_s: float = 30.0
    healthy_s: float = 60.0
    """A worker that served this long starts the doubling anew."""
    start_timeout_s: float = START_TIMEOUT_S
    """From start to hello."""
    grace_s: float = 2.0
    """Between asking a worker to leave and ending it."""

    def pause_s(self, failures: int) -> float:
        """The pause after `failures` in a row (1 and up)."""
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30))


class WorkerSupervisor:
    """See `WorkerLink`. The constructor returns at once; the first worker is then on its way."""

    def __init__(
        self,
        entry: str,
        config: Mapping[str, Any],
        *,
        link_kind: str = DEFAULT_KIND,
        new_link: Callable[[int], Link] | None = None,
        policy: RestartPolicy | None = None,
        check_hello: Callable[[Hello], None] | None = None,
    ) -> None:
        """entry, config: see `worker_process.start`. check_hello raises an SsdError for a worker that does not fit.
        new_link: makes the line for a generation, instead of one of `link_kind`."""
        self._entry, self._config = entry, dict(config)
        self._new_link = new_link or (lambda generation: make_link(link_kind, generation=generation))
        self._policy = policy or RestartPolicy()
        self._check_hello = check_hello
        self._changed = threading.Condition()
        self._news = threading.Event()
        """Set when the thread should look: a report, or the end."""
        self._closing = threading.Event()
        self._generation = 0
        self._pid: int | None = None
        self._current: Worker | None = None
        self._state = WorkerState.STARTING
        self._reason: str | None = None
        self._restarts = 0
        self._thread = threading.Thread(target=self._run, name="ssd-worker-supervisor", daemon=True)
        self._thread.start()

    # -- for the step loop: none of these waits ------------------------------------------------------------------

    def current(self) -> Worker | None:
        """The worker in service, or None."""
        return self._current

    def report(self, generation: int, reason: str) -> None:
        """End the worker of this generation (silent, gone, talking nonsense) and bring another."""
        with self._changed:
            if self._current is None or self._current.generation != generation:
                return
            self._current = None
            self._state, self._reason = WorkerState.LOST, reason
            self._changed.notify_all()
        self._news.set()

    def health(self) -> str | None:
        """None when a worker is in service, else one sentence."""
        with self._changed:
            if self._current is not None:
                return None
            why = f": {self._reason}" if self._reason else ""
            return f"no speculation, the draft worker is {self._state}{why}"

    @property
    def state(self) -> WorkerState:
        """Where the worker stands."""
        return self._state

    @property
    def reason(self) -> str | None:
        """Why the last worker was lost; None before the first loss."""
        return self._reason

    @property
    def restarts(self) -> int:
        """Workers lost so far."""
        return self._restarts

    @property
    def pid(self) -> int | None:
        """Process id of the worker that is starting or in service."""
        return self._pid

    @property
    def work_s(self) -> float | None:
        """Processor seconds of the worker process so far; None where the system does not tell."""
        return None if self._pid is None else trace.cpu_seconds(self._pid)

    # -- for those who can wait ----------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float, *, or_lost: bool = False) -> bool:
        """Wait until a worker is in service; False when none came in time, or, with `or_lost`, when one was lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is not None or (or_lost and self._restarts > 0), timeout_s)
            return self._current is not None

    def close(self) -> None:
        """Ask the worker to leave, end it if it does not, and start no more. May be called twice."""
        self._closing.set()
        self._news.set()
        self._thread.join(timeout=4.0 * self._policy.grace_s + 10.0)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            served_s = self._live()
            if self._closing.is_set():
                break
            failures = 1 if served_s >= self._policy.healthy_s else failures + 1
            pause_s = self._policy.pause_s(failures)
            log.warning("draft worker lost, serving without speculation: %s %s", self._reason, fields(retry_s=pause_s))
            self._pause(pause_s)
        self._set(WorkerState.CLOSED)

    def _live(self) -> float:
        """One worker from start to end; returns how many seconds it served."""
        self._generation += 1
        self._set(WorkerState.STARTING)
        self._news.clear()
        ready_at = None
        with contextlib.ExitStack() as stack:
            stack.push(_parted)
            try:
                link = self._new_link(self._generation)
                stack.callback(link.close)
                child = worker_process.start(self._entry, self._config, link)
                stack.callback(self._end, child)
                self._pid = child.pid
                log.info("draft worker starting %s", fields(generation=self._generation, pid=child.pid))
                worker = self._meet(link, child, stack)
                ready_at = time.monotonic()
                self._put_in_service(worker)
                self._watch(child)
            except (SsdError, OSError, subprocess.SubprocessError) as error:
                self._lose(str(error))
            except Exception as error:
                log.error("draft worker lost for an unforeseen reason", exc_info=error)
                self._lose(in_one_line(error))
        return 0.0 if ready_at is None else time.monotonic() - ready_at

    def _meet(self, link: Link, child: subprocess.Popen[bytes], stack: contextlib.ExitStack) -> Worker:
        """Wait for the line and the hello."""
        started = time.monotonic()
        line = self._await(child, started, "connected", lambda: link.accept(_POLL_S))
        stack.callback(self._leave, line, child)
        hello = introduced(self._await(child, started, "said hello", lambda: line.recv(_POLL_S)))
        if self._check_hello is not None:
            self._check_hello(hello)
        log.info("draft worker ready %s", fields(generation=self._generation, seconds=time.monotonic() - started))
        return Worker(line, hello, self._generation)

    def _await(self, child: subprocess.Popen[bytes], started: float, deed: str, look: Callable[[], Any]) -> Any:
        """Look until there is something, the worker dies, its time is up, or we close."""
        while not self._closing.is_set():
            try:
                found = look()
            except TransportError as error:
                raise TransportError(_exit_reason(child, patience_s=_EXIT_PATIENCE_S) or error.message) from error
            if found is not None:
                return found
            reason = _exit_reason(child)
            if reason is not None:
                raise TransportError(f"{reason} before it {deed}")
            if time.monotonic() - started > self._policy.start_timeout_s:
                raise TransportError(f"the draft worker has not {deed} within {self._policy.start_timeout_s:g} s")
        raise TransportError("closed while the draft worker was starting")

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Return when the worker is reported or we close; raise when it dies."""
        while not (self._closing.is_set() or self._news.wait(_POLL_S)):
            reason = _exit_reason(child)
            if reason is not None:
                raise TransportError(reason)
        if not self._closing.is_set():
            exited = _exit_reason(child, patience_s=_POLL_S)
            self._lose(f"{self._reason}: {exited}" if exited else str(self._reason))

    def _leave(self, line: Transport, child: subprocess.Popen[bytes]) -> None:
        """Part from a worker: politely from one in service, at once from one that is of no use any more."""
        if self._closing.is_set() and self._state is WorkerState.READY and child.poll() is None:
            with contextlib.suppress(TransportError):  # it is gone already
                line.send(Shutdown())
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(self._policy.grace_s)
        line.close()

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """See to it that the process we started is gone."""
        if child.poll() is None:
            child.kill()  # whoever could leave by itself was asked to; to SIGTERM a worker does not listen
        try:
            child.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            log.warning("draft worker was killed, and is held by the system %s", fields(pid=child.pid))
        self._pid = None

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._closing.is_set() and (left := deadline - time.monotonic()) > 0.0:
            self._news.clear()
            if not self._closing.is_set():
                self._news.wait(min(left, 1.0))

    def _put_in_service(self, worker: Worker) -> None:
        with self._changed:
            self._current, self._state = worker, WorkerState.READY
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._current = None
            if not self._closing.is_set():
                self._state, self._reason = WorkerState.LOST, reason
                self._restarts += 1
            self._changed.notify_all()

    def _set(self, state: WorkerState) -> None:
        with self._changed:
            self._current, self._state = None, state
            self._changed.notify_all()


def introduced(message: Message) -> Hello:
    """The hello that a worker begins with; TransportError for anything else."""
    if not isinstance(message, Hello):
        raise TransportError(f"the draft worker began with {type(message).__name__} instead of a hello")
    if message.version != PROTOCOL_VERSION:
        raise TransportError(f"the draft worker speaks version {message.version}, we speak {PROTOCOL_VERSION}")
    return message


def _exit_reason(child: subprocess.Popen[bytes], *, patience_s: float = 0.0) -> str | None:
    """How the worker ended, or None while it lives."""
    try:
        code = child.wait(patience_s) if patience_s else child.poll()
    except subprocess.TimeoutExpired:
        return None
    if code is None:
        return None
    return f"the draft worker (process {child.pid}) {how_it_ended(code)}"


def _parted(kind: type[BaseException] | None, error: BaseException | None, trace_: object) -> bool:
    """What fails when a worker is parted from is logged, and hinders no other. Last in line of an `ExitStack`."""
    if not isinstance(error, Exception):
        return False
    log.error("a draft worker could not be parted from", exc_info=error)
    return True
