"""Draft workers in this process whose line the test holds in its hands: it may corrupt, delay, or cut what passes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from ssd_ascend.engine.engine import Engine
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.setup import TargetSide
from ssd_ascend.speculation.speculators.ssd import SsdSpeculator
from ssd_ascend.speculation.worker_client import WorkerClient
from ssd_ascend.speculation.worker_link import InProcessLink
from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.messages import Message

Wrap = Callable[[Transport], Transport]


def through(monkeypatch: pytest.MonkeyPatch, wrap: Wrap) -> None:
    """From now on engines reach their worker through `wrap(line)`."""

    def make_link(side: TargetSide) -> InProcessLink:
        link = InProcessLink(side)
        link._worker = Worker(wrap(link._worker.transport), link._worker.hello, 0)
        return link

    monkeypatch.setattr("ssd_ascend.speculation.speculators.ssd.make_link", make_link)


def link_of(engine: Engine) -> InProcessLink:
    speculator = engine._speculator
    assert isinstance(speculator, SsdSpeculator)
    assert isinstance(speculator._worker, WorkerClient)
    link = speculator._worker._link
    assert isinstance(link, InProcessLink)
    return link


def worker_of(engine: Engine) -> DraftWorker:
    """The draft worker inside an engine."""
    return link_of(engine)._draft_worker


class Edited:
    """Every answer passes through `edit` from the `first` on."""

    def __init__(self, line: Transport, edit: Callable[[Message], Message], *, first: int = 0) -> None:
        self._line, self._edit, self._first = line, edit, first
        self.seen = 0

    def send(self, message: Message) -> None:
        self._line.send(message)

    def recv(self, timeout_s: float | None) -> Message | None:
        message = self._line.recv(timeout_s)
        if message is None:
            return None
        self.seen += 1
        return self._edit(message) if self.seen > self._first else message

    def close(self) -> None:
        self._line.close()


class Late:
    """Answers arrive some polls after they were asked for. A poll is a step's: no clock is involved.

    pile_up: the requests are what is late, so that the worker finds several at once and may skip to the last.
    """

    def __init__(self, line: Transport, *, seed: int, most: int, pile_up: bool) -> None:
        self._line, self._most, self._pile_up = line, most, pile_up
        self._random = random.Random(seed)
        self._polls = 0
        self._held: deque[tuple[int, Message]] = deque()
        self.late = 0

    def send(self, message: Message) -> None:
        due = self._polls + self._random.randint(0, self._most)
        if self._pile_up:
            self._held.append((due, message))
            return
        self._line.send(message)
        while (answer := self._line.recv(0.0)) is not None:
            self._held.append((due, answer))

    def recv(self, timeout_s: float | None) -> Message | None:
        self._polls += 1
        if self._pile_up:
            if self._held and max(due for due, _ in self._held) < self._polls:
                while self._held:
                    self._line.send(self._held.popleft()[1])
            answer = self._line.recv(0.0)
            self.late += answer is None
            return answer
        if self._held and self._held[0][0] < self._polls:
            return self._held.popleft()[1]
        self.late += 1
        return None

    def close(self) -> None:
        self._line.close()
