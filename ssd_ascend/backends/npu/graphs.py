"""ACL graphs behind `GraphCapture`: one graph for a bucket, and what its replay must re-issue.

Attention's lengths are host integers that a capture freezes. So each attention call is captured as a task group behind
an external event; a replay starts the graph, whose layers wait at their events, and then replaces the calls one by one
on an update stream (CANN runtime guide, dev_guide 04-03). All models of a device share that stream: with one each, the
graphs of a target and of its draft can wait for each other for ever (vllm-ascend issues 13600 and 13639).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch_npu

from ssd_ascend import trace
from ssd_ascend.backends.npu.slots import Slots

_Stream = tuple[torch.device, int]


class Reissue(Protocol):
    """Launches a captured call once more, with the lengths of the step that comes."""

    def __call__(self) -> None:
        """On the current stream."""
        ...


class _Update:
    """One captured call: the task group it became, the event before it, and how to launch it anew."""

    def __init__(self, handle: Any, event: Any, reissue: Reissue) -> None:
        self._handle = handle
        self._event = event
        self._reissue = reissue

    def run(self, stream: Any) -> None:
        """Replace the call in the graph, then let the graph pass."""
        torch_npu.npu.graph_task_update_begin(stream, self._handle)
        self._reissue()
        torch_npu.npu.graph_task_update_end(stream)
        self._event.record(stream)


class Recorder:
    """Collects the calls of the capture under way; attention asks `is_recording` and hands them to `record`."""

    def __init__(self) -> None:
        self._updates: list[_Update] | None = None
        self.number = 0
        """Of the capture under way, or of the last one."""

    @property
    def is_recording(self) -> bool:
        """Whether calls are being captured."""
        return self._updates is not None

    def record(self, launch: Callable[[], None], reissue: Reissue) -> None:
        """Capture `launch` as a task group that waits for its update."""
        assert self._updates is not None
        stream, event = torch_npu.npu.current_stream(), torch_npu.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        torch_npu.npu.graph_task_group_begin(stream)
        launch()
        handle = torch_npu.npu.graph_task_group_end(stream)
        self._updates.append(_Update(handle, event, reissue))

    @contextmanager
    def recording(self) -> Iterator[list[_Update]]:
        """The calls captured inside."""
        updates: list[_Update] = []
        self._updates = updates
        self.number += 1
        try:
            yield updates
        finally:
            self._updates = None


class Waits:
    """How often the host has waited until a stream was empty: what was queued before such a wait is over.

    `launching` is held from a graph's launch to its last update: a draft worker may live in a thread beside its target,
    and all share one update stream.
    """

    def __init__(self) -> None:
        self.launching = threading.Lock()
        self._counts: Counter[_Stream] = Counter()

    def wait(self, stream: Any) -> None:
        """Until everything on it has ended."""
        stream.synchronize()
        self._counts[_name(stream)] += 1

    def mark(self, stream: Any) -> tuple[_Stream, int]:
        """What is queued on it now is over once `mark` gives another number for the same stream."""
        return _name(stream), self._counts[_name(stream)]


def _name(stream: Any) -> _Stream:
    return stream.device, stream.npu_stream


class _Retired(NamedTuple):
    """A graph that nobody wants any more and that may still run, and the slots that it holds."""

    device: torch.device
    graph: Any
    slots: Sequence[Slots]


class NpuGraph:
    """A captured forward and the calls its replay updates."""

    def __init__(
        self, graph: Any, updates: list[_Update], stream: Any, waits: Waits, slots: Sequence[Slots] = ()
    ) -> None:
        """slots: taken for this graph, and given back once it is freed."""
        self._graph = graph
        self._updates = updates
        self._stream = stream
        self._waits = waits
        self._mark: tuple[_Stream, int] | None = None
        weakref.finalize(self, _retired().append, _Retired(stream.device, graph, slots))

    def replay(self) -> None:
        """Start the graph, then update its calls; the host does not wait.

        A record that overtakes the wait of this graph's previous replay would be lost, and this replay would hang. So
        the update stream first waits for what was queued before, unless the host has done so since, as it does once a
        step for the verdict.
        """
        with self._waits.launching:
            self._replay(torch_npu.npu.current_stream())

    def _replay(self, current: Any) -> None:
        mark = self._waits.mark(current)
        with trace.span("graph_launch"):
            if self._mark is None or self._mark[0] != mark[0] or self._mark == mark:
                self._stream.wait_stream(current)
            self._mark = mark
            self._graph.replay()
        with torch_npu.npu.stream(self._stream):
            for update in self._updates:
                with trace.span("graph_update"):
                    update.run(self._stream)


@cache
def _retired() -> list[_Retired]:
    atexit.register(bury)
    return []


def bury(device: torch.device | None = None) -> None:
    """Free the graphs that were dropped, on this device or on all, once they have ended. Not while one is replayed.

    Nobody below waits for a graph that is freed, and a draft's may still run when its engine is dropped. Whoever drops
    it cannot wait either: garbage is collected at any time, also between the updates that a running graph waits for.
    """
    mine = [entry for entry in _retired() if device in (None, entry.device)]
    with contextlib.suppress(RuntimeError):  # a device that is lost has said so, and nothing runs on it
        for where in {entry.device for entry in mine}:
            torch_npu.npu.synchronize(where)
    for entry in mine:
        _retired().remove(entry)
        for slots in entry.slots:
            slots.give()


class NpuGraphs:
    """Captures on a stream of its own; its graphs share one memory pool, since only one of them replays at a time."""

    def __init__(
        self, device: torch.device, recorder: Recorder, update_stream: Any, waits: Waits, slots: Sequence[Slots] = ()
    ) -> None:
        """slots: a graph takes one of each."""
        self._device = device
        self._waits = waits
        self._recorder = recorder
        self._update_stream = update_stream
        self._slots = slots
        self._stream = torch_npu.npu.Stream(device)
        self._pool = torch_npu.npu.graph_pool_handle()

    def make_room(self) -> None:
        """Free what models that were dropped hold, where this chip keeps no more: nobody may have found them yet."""
        if self._full():
            gc.collect()
            bury(self._device)

    def may_capture(self) -> bool:
        """Whether this chip keeps one more graph; the first that it does not is told of."""
        for slots in (full := self._full()):
            slots.tell_once(self._device)
        return not full

    def _full(self) -> list[Slots]:
        return [slots for slots in self._slots if not slots.are_left]

    def capture(self, fn: Callable[[], None]) -> NpuGraph:
        """Run `fn` once (first shapes build their tiling, lazy state settles), then record it."""
        with contextlib.ExitStack() as undo:
            for slots in self._slots:
                if not slots.take():
                    slots.tell_once(self._device)
                    raise RuntimeError("this chip keeps no more captured graphs; a larger one may serve")
                undo.callback(slots.give)
            graph = self._captured(fn)
            undo.pop_all()
        return graph

    def _captured(self, fn: Callable[[], None]) -> NpuGraph:
        self._stream.wait_stream(torch_npu.npu.current_stream(self._device))
        with torch_npu.npu.stream(self._stream):
            fn()
        torch_npu.npu.synchronize(self._device)
        bury(self._device)
        graph = torch_npu.npu.NPUGraph()
        with self._recorder.recording() as updates, torch_npu.npu.graph(graph, pool=self._pool, stream=self._stream):
            fn()
        return NpuGraph(graph, updates, self._update_stream, self._waits, self._slots)
