"""CUDA graphs behind `GraphCapture`.

Those captured by one share a memory pool, since only one of them replays at a time. Those of two may replay side by
side, as a worker's thread does beside the target.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_capturing = threading.Lock()


class CudaGraphs:
    """Captures on a stream of its own; `torch.cuda.graph` keeps other streams out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, fn: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `fn` once (kernels compile, lazy state settles), then record it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            fn()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # by thread: a collective library's own thread may look at its events meanwhile
        with (
            _nothing_collected(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            fn()
        return graph


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Hold the garbage collector back, one capture at a time: a graph of an engine that is no more, collected by the
    capturing thread, would end the capture. (What is garbage before is collected by `torch.cuda.graph` itself.)"""
    with _capturing:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
