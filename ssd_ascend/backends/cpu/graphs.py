"""`GraphCapture` for the CPU: a forward becomes a tape of kernel calls, replayed without the interpreter between them.

A decode step of a small model is some 300 kernels of tens of microseconds; Python takes nearly ten microseconds to
reach each. Runs of compiled kernels replay as one native call; a torch operator between them is called again and its
result copied to where the capture put it. Whatever cannot be replayed ends the capture with an error, never silently.
Results of a capture stay where they are for as long as it lives, so there is a limit to what all of them may hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssd_ascend.backends.cpu.native.library import Library

_UNKNOWN_UNTIL_RUN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_aten = torch.ops.aten
_WITHOUT_CONTENT = frozenset((
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
))  # fmt: skip

_MOST_BYTES = 96 << 20
"""Of intermediate results, over all captures: SmolLM2-135M's take about 1.2 MB a token."""

Step = Callable[[], object]


class CpuGraph:
    """A captured forward: its steps, and every tensor that the addresses on the tape point into."""

    def __init__(self, library: Library, tape: int) -> None:
        self._steps: list[Step] = []
        self._kept: dict[int, torch.UntypedStorage] = {}
        self.size = 0
        """Bytes that it keeps."""
        self._library = library
        self._tape = tape
        self._played = 0
        weakref.finalize(self, library.tape_free, tape)

    def replay(self) -> None:
        """Run it again over the same addresses."""
        for step in self._steps:
            step()

    def keep(self, tensor: torch.Tensor, *, made_here: bool) -> None:
        """Hold on to a tensor's memory, which counts where this capture allocated it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = storage
            self.size += storage.nbytes() if made_here else 0

    def add(self, step: Step) -> None:
        """What Python has to do between the kernels recorded so far and those to come."""
        self.close()
        self._steps.append(step)

    def close(self) -> None:
        """Make the kernels recorded since the last step a step of their own."""
        start, self._played = self._played, self._library.tape_size(self._tape)
        if self._played > start:
            play, tape, end = self._library.tape_play, self._tape, self._played
            self._steps.append(lambda: play(tape, start, end))


class CpuGraphs:
    """Captures callables whose work is compiled kernels and torch operators on CPU tensors."""

    def __init__(self, library: Library, most_bytes: int = _MOST_BYTES) -> None:
        self._library = library
        self._bytes_left = most_bytes

    def capture(self, fn: Callable[[], None]) -> CpuGraph:
        """Run `fn` once, writing it down. RuntimeError where an operator cannot be replayed, or there is no room."""
        tape = self._library.tape_new()
        graph = CpuGraph(self._library, tape)
        self._library.tape_record(tape)
        try:
            with _Recorder(graph, self._bytes_left):
                fn()
        finally:
            self._library.tape_record(None)
        graph.close()
        self._bytes_left -= graph.size
        return graph


class _Recorder(TorchDispatchMode):
    """Sees every torch operator of a capture: keeps what it allocates, and makes a step of what it computes."""

    def __init__(self, graph: CpuGraph, most_bytes: int) -> None:
        super().__init__()
        self._graph = graph
        self._most_bytes = most_bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler is told to leave us alone: importing it takes seconds, and it never comes here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in _UNKNOWN_UNTIL_RUN):
            raise RuntimeError(f"{func} cannot be captured: its result decides what comes next")
        result = func(*args, **kwargs)
        results = [value for value in _flat(result) if isinstance(value, torch.Tensor)]
        looks, writes = _is_view(func, args, results), func._schema.is_mutable
        for tensor in results:
            self._graph.keep(tensor, made_here=not (looks or writes))
        if self._graph.size > self._most_bytes:
            raise RuntimeError(f"intermediate results take more than the {self._most_bytes >> 20} MB left for them")
        if looks or func in _WITHOUT_CONTENT:
            return result
        if writes:
            self._graph.add(lambda: func(*args, **kwargs))
        else:
            self._graph.add(lambda: _again(func, args, kwargs, results))
        return result


def _again(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
    """Call a pure operator and put what it gives where its first call's results are."""
    found = (value for value in _flat(func(*args, **kwargs)) if isinstance(value, torch.Tensor))
    for kept, value in zip(results, found, strict=True):
        kept.copy_(value)


def _is_view(func: Any, args: Any, results: list[torch.Tensor]) -> bool:
    """Whether the results only look at memory of the arguments. A schema only says that they may: `to` may copy."""
    if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return False
    theirs = {x.untyped_storage().data_ptr() for arg in args for x in _flat(arg) if isinstance(x, torch.Tensor)}
    return all(result.untyped_storage().data_ptr() in theirs for result in results)


def _flat(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
