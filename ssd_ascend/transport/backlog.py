"""Bytes that a socket's kernel buffer did not take at once, written by a thread of their own.

A draft worker reads between two rounds of drafting, and the features of a few tokens are larger than the buffer: a
sender that waited would hold up the target's step for as long as the worker drafts. Used by `socket.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from ssd_ascend.errors import TransportError

MOST_BYTES: Final = 32 << 20
"""Beyond this a sender waits after all."""


class Backlog:
    """Frames in the order they were given. `write` sends one whole, or raises when the line is of no use any more."""

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write
        self._frames: deque[memoryview] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False

    @property
    def is_empty(self) -> bool:
        """Whether the next frame may go out directly."""
        return not self._frames

    def add(self, frame: memoryview) -> None:
        """Write `frame` after all before it; waits only while too much lies here."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes <= MOST_BYTES or self._ended)
            if self._ended:
                return
            self._frames.append(frame)
            self._bytes += len(frame)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="socket backlog", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is left and end the thread; the line must have been broken, so that `write` returns."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (frame := self._next()) is not None:
                self._write(frame)
                with self._changed:
                    self._frames.popleft()
                    self._bytes -= len(frame)
                    self._changed.notify_all()
        except (OSError, TransportError):  # `write` has told the line why, and the line tells whoever uses it next
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> memoryview | None:
        """The frame at the front, when there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._ended)
            return None if self._ended else self._frames[0]
