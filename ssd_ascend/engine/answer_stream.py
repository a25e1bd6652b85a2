"""What the HTTP handlers read an answer from; `AsyncEngine.generate` makes one per user request. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ssd_ascend.engine.answers import AnswerDelta


class AnswerStream:
    """The deltas of one user request, in order: `async for deltas in stream`, each a list of all that has come since.

    A request of several prompts has n answers per prompt, numbered through: answer = prompt * n + index. Close it
    (it is a context manager) and whatever still runs is aborted.
    """

    def __init__(self, num_answers: int, close: Callable[[AnswerStream], None]) -> None:
        self._unfinished = num_answers
        self._close = close
        self._ready: list[AnswerDelta] = []
        self._wake = asyncio.Event()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._close(self)

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> list[AnswerDelta]:
        if not self._ready and self._unfinished == 0:
            raise StopAsyncIteration
        await self._wake.wait()
        self._wake.clear()
        deltas, self._ready = self._ready, []
        return deltas

    async def first(self, patience_s: float) -> list[AnswerDelta]:
        """The first deltas, left to be read; none when none has come within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._wake.wait()
        return list(self._ready)

    def put(self, delta: AnswerDelta) -> None:
        """The engine's side: one more delta."""
        self._ready.append(delta)
        self._unfinished -= delta.finish_reason is not None
        self._wake.set()
