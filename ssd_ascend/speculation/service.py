"""Speculation as a service: one drafter, a line to each of several targets, and their requests in turn.

Targets come and go while it runs. One thread lets them in; the one that called `serve` does all drafting, because a
device does one thing at a time anyway. Started by `python -m ssd_ascend.speculate`.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from ssd_ascend.errors import TransportError, in_one_line
from ssd_ascend.log import get_logger
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.remote_link import mismatch
from ssd_ascend.transport.messages import Hello, Refusal
from ssd_ascend.transport.socket import SocketTransport
from ssd_ascend.transport.tcp import Listener

_POLL_S: Final = 0.25
_HELLO_S: Final = 5.0
_HOPELESS: Final = 3
"""Where so many targets in a row bring an error, it is not theirs: a device that is lost fails for everybody, and who
started this process can start it anew."""
log = get_logger(__name__)

MakeWorker = Callable[[SocketTransport, Callable[[], bool]], DraftWorker]
"""Makes the worker for one target's line; the second is `others_wait`."""


@dataclass(frozen=True, slots=True)
class _Guest:
    """A target that was let in."""

    line: SocketTransport
    worker: DraftWorker
    name: int


class SpeculatorService:
    """Serves whoever proves the secret and has the right target. `serve` returns after `stop`."""

    def __init__(self, listener: Listener, make_worker: MakeWorker, hello: Hello) -> None:
        """All workers that `make_worker` makes share one drafter. hello: what we say of ourselves."""
        self._listener = listener
        self._make_worker = make_worker
        self._hello = hello
        self._stopping = threading.Event()
        self._arrivals: queue.SimpleQueue[SocketTransport] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._guests: list[_Guest] = []
        self._names = 0
        self._failures = 0
        """Targets in a row that could not be drafted for."""

    @property
    def num_guests(self) -> int:
        """Targets being served."""
        return len(self._guests)

    def serve(self) -> None:
        """Let targets in and draft for them until `stop`."""
        door = threading.Thread(target=self._welcome, name="ssd-speculator-door", daemon=True)
        door.start()
        try:
            while not self._stopping.is_set():
                self._admit()
                if not self._round():
                    self._wait()
        finally:
            self.stop()
            door.join()
            for guest in list(self._guests):
                self._part(guest, "the speculator stops")
            self._listener.close()
            self._bell.close()
            self._ringer.close()

    def stop(self) -> None:
        """End `serve`; from any thread or a signal handler."""
        self._stopping.set()
        with contextlib.suppress(OSError):  # it has ended already
            self._ringer.send(b"!")

    # -- the door ------------------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        """Body of the door's thread: hellos are exchanged here, so that drafting never waits for them. Nobody would
        start it again, so it lives through whatever a caller brings about."""
        trouble = None
        while not self._stopping.is_set():
            try:
                line = self._listener.accept(_POLL_S)
            except Exception as error:  # noqa: BLE001  out of files, as a rule: some come back when a target leaves
                reason = in_one_line(error)
                if reason != trouble:
                    log.warning("no target can be let in for now: %s", reason)
                trouble = reason
                self._stopping.wait(_POLL_S)
                continue
            if line is None:
                continue
            trouble = None
            if self._introduced(line):
                self._arrivals.put(line)
                self._ringer.send(b"!")

    def _introduced(self, line: SocketTransport) -> bool:
        try:
            hello = line.recv(_HELLO_S)
            reason = mismatch(hello, self._hello) if isinstance(hello, Hello) else "a target begins with a hello"
            line.send(self._hello if reason is None else Refusal(reason))
        except Exception as error:  # noqa: BLE001  the next caller may do better
            reason = in_one_line(error)
        if reason is not None:
            log.warning("a target was turned away: %s", reason)
            line.close()
        return reason is None

    def _admit(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(64):
                pass
        while not self._arrivals.empty():
            line = self._arrivals.get()
            self._names += 1
            worker = self._make_worker(line, partial(self._others_wait, line))
            self._guests.append(_Guest(line, worker, self._names))
            log.info("target %d is here, %d in all", self._names, len(self._guests))

    # -- drafting ------------------------------------------------------------------------------------------------

    def _round(self) -> bool:
        """One turn for each target that has sent something; False when none had."""
        any_work = False
        for guest in list(self._guests):
            try:
                if guest.worker.pump():
                    any_work, self._failures = True, 0
            except TransportError as error:
                self._part(guest, error.message)
            except Exception as error:
                log.exception("target %d cannot be drafted for", guest.name)
                self._part(guest, in_one_line(error))
                self._failures += 1
                if self._failures >= _HOPELESS:
                    raise
        return any_work

    def _others_wait(self, line: SocketTransport) -> bool:
        """Whether a target other than the one at `line` has sent something."""
        others = [guest.line.fileno() for guest in self._guests if guest.line is not line]
        if not others:
            return False
        poll = select.poll()
        for number in others:
            poll.register(number, select.POLLIN)
        return bool(poll.poll(0))

    def _part(self, guest: _Guest, reason: str) -> None:
        self._guests.remove(guest)
        guest.line.close()
        guest.worker.close()
        log.info("target %d has gone (%s), %d left", guest.name, reason, len(self._guests))

    def _wait(self) -> None:
        """Sleep until a target or the door has news. All targets hear of the idle time: each may tell us a little later
        of a step where there is some."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for guest in self._guests:
            poll.register(guest.line.fileno(), select.POLLIN)
        start = time.perf_counter()
        poll.poll()
        for guest in self._guests:
            guest.worker.rested(time.perf_counter() - start)
