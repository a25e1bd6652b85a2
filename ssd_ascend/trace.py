"""Where time is measured: `with trace.span("forward"):` around a step; no other code reads a clock for it.

Off (the default) a span costs one attribute test and no allocation; on, it counts calls, total and longest
nanoseconds per name. The engine, the benchmarks and `--json` statistics read `summary()`. What another process uses of
the processor is read here as well.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True, slots=True)
class SpanStats:
    """What was recorded under one name; times in nanoseconds."""

    count: int
    total_ns: int
    max_ns: int

    @property
    def mean_ms(self) -> float:
        """Mean duration in milliseconds."""
        return self.total_ns / self.count / 1e6


class Tracer:
    """Collects spans of all threads of one process."""

    __slots__ = ("_lock", "_stats", "enabled")

    def __init__(self) -> None:
        self.enabled = False
        self._lock = threading.Lock()
        self._stats: dict[str, list[int]] = {}

    def add(self, name: str, elapsed_ns: int) -> None:
        """Record one finished span."""
        with self._lock:
            entry = self._stats.setdefault(name, [0, 0, 0])
            entry[0] += 1
            entry[1] += elapsed_ns
            entry[2] = max(entry[2], elapsed_ns)

    def summary(self) -> dict[str, SpanStats]:
        """A copy of what was recorded, by name."""
        with self._lock:
            return {name: SpanStats(*entry) for name, entry in self._stats.items()}

    def reset(self) -> None:
        """Forget everything recorded."""
        with self._lock:
            self._stats.clear()


class _Span:
    __slots__ = ("_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = 0

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _TRACER.add(self._name, time.perf_counter_ns() - self._start)


class _Off:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_TRACER = Tracer()  # one per process on purpose: a clock that had to be passed to every function would not be used
_OFF = _Off()


def span(name: str) -> AbstractContextManager[None]:
    """Time the body of a `with` under `name`; free when tracing is off. An exception inside is timed and passes."""
    return _Span(name) if _TRACER.enabled else _OFF


def enable() -> None:
    """Start recording spans in this process."""
    _TRACER.enabled = True


def disable() -> None:
    """Stop recording; what was recorded stays until `reset`."""
    _TRACER.enabled = False


def enabled() -> bool:
    """Whether spans are being recorded."""
    return _TRACER.enabled


def summary() -> dict[str, SpanStats]:
    """Count, total and longest nanoseconds per span name."""
    return _TRACER.summary()


def reset() -> None:
    """Forget every recorded span."""
    _TRACER.reset()


def cpu_seconds(pid: int) -> float | None:
    """Processor time that a process has used so far, all its threads; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
