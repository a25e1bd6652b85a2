"""The loop of the engine process: what it reports while nobody asks for anything."""

from __future__ import annotations

from typing import Any

import pytest

from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.messages import Abort, Command, Shutdown, Stats
from ssd_ascend.engine.process import _Loop
from ssd_ascend.errors import WorkerError

LOST = "rank 1 was killed"


class Line:
    """A channel on which these commands come, one list each time it is looked at."""

    def __init__(self, *script: list[Command]) -> None:
        self._script = list(script)
        self.sent: list[Any] = []

    def commands(self, *, most_s: float | None) -> list[Command]:
        assert most_s, "nobody would look after the worker"
        return self._script.pop(0)

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Idle:
    """An engine without work, whose worker is in these states one after the other."""

    has_work = False

    def __init__(self, *healths: str | None) -> None:
        self._healths = list(healths)
        self._restarts = 0

    def health(self) -> str | None:
        health = self._healths.pop(0)
        self._restarts += health is not None
        return health

    def check(self) -> None:
        if self._healths[0] == LOST:
            raise WorkerError(LOST)

    def stats(self) -> EngineStats:
        stats = EngineStats()
        stats.speculation.worker_restarts = self._restarts
        return stats

    def abort(self, seq_ids: Any) -> None:
        pass


def reports(line: Line, engine: Idle) -> list[tuple[str | None, int]]:
    _Loop(line, engine).run([])  # type: ignore[arg-type]
    assert all(isinstance(message, Stats) for message in line.sent)
    return [(message.degraded, message.stats.speculation.worker_restarts) for message in line.sent]


def test_a_worker_that_is_lost_and_comes_back_is_reported_without_a_request() -> None:
    line = Line([], [], [], [Shutdown()])
    assert reports(line, Idle(None, "lost", None, None)) == [(None, 0), ("lost", 1), (None, 1)]


def test_commands_are_followed_by_a_report_even_if_nothing_changed() -> None:
    line = Line([Abort([1])], [], [Shutdown()])
    assert reports(line, Idle(None, None, None)) == [(None, 0), (None, 0)]


def test_a_rank_that_is_lost_while_nobody_asks_ends_the_engine() -> None:
    """Whoever started it starts another; it must not look as if it could answer."""
    line = Line([], [Shutdown()])
    with pytest.raises(WorkerError, match=LOST):
        reports(line, Idle(None, LOST))
    assert len(line.sent) == 1
