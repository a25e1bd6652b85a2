"""The line between rank 0 of a model, which decides, and the ranks that follow it: one small message down per step.

Plain sockets, because rank 0 must say what comes next before any collective can run, and because a socket shows the
death of its other end at once where a collective would wait. Up the line go signs of life, a word whenever a rank is
ready to meet the others, and a last sentence.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from ssd_ascend.errors import SsdError, TransportError, WorkerError, in_one_line
from ssd_ascend.log import get_logger
from ssd_ascend.transport import tcp

_LENGTH: Final = struct.Struct("=I")
_RANK: Final = struct.Struct("=I")
_NOTHING: Final = _LENGTH.pack(0)
"""Down the line: leave. Up the line: I am alive."""
_READY: Final = 0xFFFFFFFF
"""Up the line, for a length: I have come so far as all shall."""
_GO_ON: Final = b"go on"
_ALIVE_EVERY_S: Final = 1.0
SILENCE_S: Final = 30.0
"""A rank that gives no sign of life for so long counts as dead: stopped, or cut off."""
_MOST_TEXT: Final = 1 << 16
_MOST_BODY: Final = 1 << 30
_LAST_WORDS_S: Final = 3.0
"""How long a rank without a leader may take to leave by itself."""
_JOIN_S: Final = 60.0
_NAME_S: Final = 5.0
"""How long the rest of a rank's number may take when a part of it is there."""
_LOOK_EVERY_S: Final = 0.25
log = get_logger(__name__)


class Leader:
    """Rank 0's end of all lines. One thread of ours watches the others; `failure` says what became of them."""

    def __init__(
        self,
        lines: Mapping[int, socket.socket],
        *,
        fate: Callable[[int], str | None] = lambda rank: None,
        on_failure: Callable[[], None] = lambda: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """lines: by rank. fate: how the process of a rank ended, where that can be told. on_failure: called once, from
        our thread, when a rank is lost; it wakes whoever waits for that rank."""
        self.failure: str | None = None
        self._lines = dict(lines)
        self._fate = fate
        self._on_failure = on_failure
        self._silence_s = silence_s
        self._closing = False
        self._absent = set(lines)
        """Ranks that are not ready yet, the next time that all shall be."""
        self._changed = threading.Condition()
        """Of `failure` and `_absent`."""
        self._thread = threading.Thread(target=self._watch, name="ssd-rank-watch", daemon=True)
        self._thread.start()

    def post(self, body: bytes) -> None:
        """Send one message to every rank. Raises WorkerError when one is lost."""
        self.check()
        message = _LENGTH.pack(len(body)) + body
        try:
            for line in self._lines.values():
                line.sendall(message)
        except OSError as error:
            raise self.lost(wait_s=_LAST_WORDS_S) or _lost(f"a rank hung up: {error}") from error

    def check(self) -> None:
        """Raises WorkerError when a rank was lost: what came out of a collective since then means nothing."""
        if self.failure is not None:
            raise _lost(self.failure)

    def lost(self, *, wait_s: float) -> WorkerError | None:
        """The loss of a rank that is behind some other error, given a moment to show; None when there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, wait_s)
        return None if self.failure is None else _lost(self.failure)

    def call_roll(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has said that it is ready. WorkerError when one is lost, or is not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or not self._absent, timeout_s)
            absent, self._absent = self._absent, set(self._lines)
        self.check()
        if absent:
            raise WorkerError(
                f"ranks {sorted(absent)} were not ready within {timeout_s:g} s", remedy="look at their own output"
            )

    def barrier(self) -> None:
        """Wait for all ranks, each of which calls its own end's `barrier`. WorkerError when one is lost."""
        self.call_roll()
        self.post(_GO_ON)

    def close(self) -> None:
        """Tell every rank to leave. May be called twice."""
        self._closing = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # it is gone already
                line.sendall(_NOTHING)
        self._thread.join(timeout=2.0 * _ALIVE_EVERY_S)
        for line in self._lines.values():
            line.close()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {line.fileno(): rank for rank, line in self._lines.items()}
        for number in ranks:
            poll.register(number, select.POLLIN)
        heard = dict.fromkeys(self._lines, time.monotonic())
        while not self._closing:
            for number, _ in poll.poll(1000.0 * _ALIVE_EVERY_S / 4.0):
                rank = ranks[number]
                if (last_words := self._hear(rank)) is not None:
                    return self._fail(f"rank {rank} {last_words}")
                heard[rank] = time.monotonic()
            for rank, when in heard.items():
                if time.monotonic() - when > self._silence_s:
                    return self._fail(f"rank {rank} gave no sign of life for {self._silence_s:g} s")
        return None

    def _hear(self, rank: int) -> str | None:
        """None for a sign of life, else the last words of a rank, or how it ended without any."""
        line = self._lines[rank]
        try:
            (length,) = _LENGTH.unpack(_take(line, _LENGTH.size))
            if length == _READY:
                with self._changed:
                    self._absent.discard(rank)
                    self._changed.notify_all()
            if length in (0, _READY):
                return None
            if length > _MOST_TEXT:
                return f"talks nonsense: a last word of {length} bytes"
            return f"failed: {_take(line, length).decode('utf-8', 'replace')}"
        except OSError:
            return self._fate(rank) or "is gone"

    def _fail(self, reason: str) -> None:
        if self._closing:
            return
        with self._changed:
            self.failure = reason
            self._changed.notify_all()
        log.error("%s: the target cannot go on", reason)
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # wakes a sender of ours, and tells the other ranks
                line.shutdown(socket.SHUT_RDWR)
        self._on_failure()


def _lost(reason: str) -> WorkerError:
    return WorkerError(reason, remedy="its own message is above; a target needs all its ranks, so start it again")


def _take(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = line.recv_into(view)
        if got == 0:
            raise ConnectionError("the other side hung up")
        view = view[got:]
    return bytes(data)


class Follower:
    """Another rank's end. A thread of ours gives signs of life, and ends this process when its leader is gone."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sending = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._live, name="ssd-rank-life", daemon=True)
        self._thread.start()

    def receive(self) -> bytes | None:
        """The next message, however long it takes; None when it is time to leave."""
        try:
            (length,) = _LENGTH.unpack(_take(self._line, _LENGTH.size))
            if length > _MOST_BODY:
                raise TransportError(f"a message of {length} bytes from rank 0")
            return _take(self._line, length) if length else None
        except OSError:
            return None

    def barrier(self) -> None:
        """Wait for all ranks. WorkerError when the leader is gone."""
        self.ready()
        if self.receive() != _GO_ON:
            raise WorkerError("rank 0 is gone", remedy="its own message says why")

    def ready(self) -> None:
        """Tell the leader that this rank has come so far as all shall."""
        with self._sending, contextlib.suppress(OSError):  # who waits for the group learns of a lost leader
            self._line.sendall(_LENGTH.pack(_READY))

    def fail(self, reason: str) -> None:
        """Tell the leader why this rank cannot go on."""
        text = reason.encode()[:_MOST_TEXT]
        with self._sending, contextlib.suppress(OSError):  # the leader may be what failed
            self._line.sendall(_LENGTH.pack(len(text)) + text)

    @contextlib.contextmanager
    def telling(self, who: str) -> Iterator[None]:
        """Around all that a rank does; hangs up in the end. An error inside, of whatever kind, is told to the leader in
        one line and raises SystemExit with status 1; what more there is to say of it stands in the log, under `who`."""
        try:
            yield
        except Exception as error:  # whatever it is: a rank without a last word has just vanished
            reason = in_one_line(error)
            log.warning("%s leaves: %s", who, reason, exc_info=not isinstance(error, SsdError))
            self.fail(reason)
            raise SystemExit(1) from error
        finally:
            self.close()

    def close(self) -> None:
        """Hang up."""
        self._leaving.set()
        self._thread.join()
        self._line.close()

    def _live(self) -> None:
        poll = select.poll()
        poll.register(self._line, select.POLLRDHUP)
        while not self._leaving.is_set():
            if poll.poll(1000.0 * _ALIVE_EVERY_S):
                # it may be in the middle of a collective that will never end, in which no exception reaches it
                if not self._leaving.wait(_LAST_WORDS_S):
                    log.warning("rank 0 is gone: this rank leaves")
                    os._exit(1)
                return
            with self._sending, contextlib.suppress(OSError):  # the poll says the same, and acts on it
                self._line.sendall(_NOTHING)


def gather(
    listener: tcp.Listener, size: int, *, timeout_s: float, fate: Callable[[int], str | None] = lambda rank: None
) -> dict[int, socket.socket]:
    """The lines of ranks 1 to size - 1, once all have called. WorkerError when one died, or did not come in time."""
    lines: dict[int, socket.socket] = {}
    callers: list[socket.socket] = []
    deadline = time.monotonic() + timeout_s
    try:
        while len(lines) < size - 1:
            line = listener.accept_socket(_LOOK_EVERY_S)
            callers += [line] if line is not None else []
            lines |= _named(callers)
            missing = [rank for rank in range(1, size) if rank not in lines]
            for rank in missing if line is None else []:
                if end := fate(rank):
                    raise WorkerError(f"rank {rank} {end} before it had joined", remedy="its own message is above")
            if missing and time.monotonic() > deadline:
                raise WorkerError(
                    f"ranks {missing} did not join within {timeout_s:g} s", remedy="look at their own output"
                )
    except BaseException:
        for line in lines.values():
            line.close()
        raise
    finally:
        for line in callers:
            line.close()
    return lines


def _named(callers: list[socket.socket]) -> dict[int, socket.socket]:
    """The lines of those who say which rank they are, no longer among `callers`. One that called and says nothing, as
    when its process was stopped there, must not be what everybody waits for."""
    lines: dict[int, socket.socket] = {}
    for line in select.select(callers, [], [], _LOOK_EVERY_S if callers else 0.0)[0]:
        callers.remove(line)
        line.settimeout(_NAME_S)
        try:
            (rank,) = _RANK.unpack(_take(line, _RANK.size))
        except OSError:  # it hung up: its fate says more
            line.close()
            continue
        line.settimeout(None)
        lines[rank] = line
    return lines


def join(host: str, port: int, secret: str, rank: int) -> Follower:
    """Call the leader. TransportError when it is not there."""
    line = tcp.connect_socket(host, port, secret, timeout_s=_JOIN_S)
    line.sendall(_RANK.pack(rank))
    return Follower(line)
