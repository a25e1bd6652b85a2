"""A target whose ranks are threads of this process: engines of several ranks in a moment, and all that they ran.

Where one rank does anything that the others do not, or in another order, the collectives here say so at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.engine import builder
from ssd_ascend.engine.rank import run_steps
from ssd_ascend.runtime.model_runner import ModelRunner

_PATIENCE_S = 300.0


class Ran(NamedTuple):
    """A forward, as far as the ranks must agree."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    kv_lens: list[int]


class Seat:
    """`Collectives` of one thread. What all are at is compared before anything is done."""

    def __init__(self, rank: int, seats: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(seats)
        self._seats, self._barrier = seats, barrier

    def _everyone(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        self._seats[self.rank] = (what, tuple(x.shape), x)
        self._barrier.wait(timeout=_PATIENCE_S)
        found = list(self._seats)
        self._barrier.wait(timeout=_PATIENCE_S)
        if len({seat[:2] for seat in found}) > 1:
            self._barrier.abort()
            raise AssertionError(f"the ranks are at {[seat[:2] for seat in found]}")
        return [seat[2] for seat in found]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._everyone("sum", x)).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._everyone("gather", x), dim=dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        copied = x.copy_(self._everyone("broadcast", x)[src].clone())
        self._barrier.wait(timeout=_PATIENCE_S)  # the source may be written over from here on
        return copied

    def barrier(self) -> None:
        self._everyone("barrier", torch.zeros(0))


class _Line:
    """Stands for `control.Leader` and, rank by rank, for `control.Follower`."""

    def __init__(self) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()

    def receive(self) -> bytes | None:
        return self.messages.get(timeout=_PATIENCE_S)


class ThreadRanks:
    """Stands for `distributed.launch.Ranks`, and for its own `leader`."""

    failure: str | None = None

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        size = config.tensor_parallel
        barrier, seats = threading.Barrier(size), [None] * size
        self.leader = self
        self.collectives, *others = (Seat(rank, seats, barrier) for rank in range(size))
        self.ran: list[list[Ran]] = [[] for _ in range(size)]
        self.errors: list[BaseException] = []
        self._barrier, self._lines = barrier, [_Line() for _ in others]
        self._threads = [
            threading.Thread(target=self._follow, args=(config, backend, *of), daemon=True)
            for of in zip(others, self._lines, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, config: EngineConfig, backend: Backend, seat: Seat, line: _Line) -> None:
        try:
            runner = builder.load_target(config, backend, torch.device("cpu"), seat).runner
            self.record(seat.rank, runner)
            run_steps(runner, seat, line)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001  whatever it is, the test must hear of it
            self.errors.append(error)
            self._barrier.abort()

    def record(self, rank: int, runner: ModelRunner) -> None:
        """Note each forward of this rank from now on."""
        own = runner.forward

        def forward(batch: ForwardBatch) -> ModelOutput:
            meta = batch.attention
            count, rows = sum(meta.query_lens_host), len(meta.query_lens_host)
            parts = (batch.input_ids[:count], batch.positions[:count], meta.slot_mapping[:count], meta.kv_lens[:rows])
            self.ran[rank].append(Ran(*(part.tolist() for part in parts)))
            return own(batch)

        runner.forward = forward  # type: ignore[method-assign]

    @contextmanager
    def explaining(self) -> Iterator[None]:
        yield

    def post(self, message: bytes) -> None:
        for line in self._lines:
            line.messages.put(message)

    def check(self) -> None:
        if self.errors:
            raise AssertionError("a rank failed") from self.errors[0]

    def close(self) -> None:
        """Send the ranks home; all have run the very same steps, also those that were still to come."""
        for line in self._lines:
            line.messages.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
            assert not thread.is_alive()
        self.check()
        assert all(own == self.ran[0] for own in self.ran)


def ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> list[ThreadRanks]:
    """Engines that are built from now on have their ranks in this process; the list of what they have."""
    made: list[ThreadRanks] = []
    build = builder.Executor

    def gather(config: EngineConfig, backend: Backend, model: ModelConfig) -> ThreadRanks | None:
        if config.tensor_parallel == 1:
            return None
        made.append(ThreadRanks(config, backend))
        return made[-1]

    def executor(runner: ModelRunner, ranks: Any) -> builder.Executor:
        if ranks is not None:
            ranks.record(0, runner)
        return build(runner, ranks)

    monkeypatch.setattr(builder, "gather_ranks", gather)
    monkeypatch.setattr(builder, "Executor", executor)
    return made
