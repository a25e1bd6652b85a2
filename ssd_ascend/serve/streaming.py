"""Sends one answer over HTTP, whole or as server-sent events, and aborts it in the engine when the client leaves.

Every endpoint that generates uses it, with a `Writer` of its own for the shape of its JSON. All tokens that came since
the last write leave in one write, so that a slow loop catches up instead of falling behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ssd_ascend.engine.answer_stream import AnswerStream
from ssd_ascend.engine.answers import Answer, AnswerDelta, AnswerStats
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.access import OUTCOME
from ssd_ascend.serve.errors import ApiError, error_response, renamed

_DONE = b"data: [DONE]\n\n"
_HEAD_WAITS_S: Final = 1.0
"""The engine takes or refuses a request between two steps: so long may the head of a stream wait for its first tokens,
that what goes wrong before them has a status of its own."""
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect what we stream
]


class Writer(Protocol):
    """The shape of one endpoint's JSON, for one request."""

    def opening(self) -> bytes:
        """Events to send before any token."""
        ...

    def event(self, delta: AnswerDelta) -> bytes:
        """The event of one delta; empty when there is nothing to show yet."""
        ...

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        """Events after the last token; `stats` by number of the answer."""
        ...

    def whole(self, answers: list[Answer]) -> bytes:
        """The body of a response that is not streamed."""
        ...


class AnswerResponse(Response):
    """Owns an AnswerStream from the moment it is made: however the response ends, the stream is closed."""

    def __init__(
        self,
        stream: AnswerStream,
        writer: Writer,
        *,
        num_answers: int,
        streamed: bool,
        on_disconnect: Callable[[], None],
        timeout_s: float | None,
        names: Mapping[str, str],
    ) -> None:
        """timeout_s: how long the answer may take; then it ends with an error, and what runs of it is aborted.
        names: what the endpoint calls fields that the engine calls otherwise."""
        super().__init__()
        self._names = names
        self._timeout_s = timeout_s
        self._stream = stream
        self._writer = writer
        self._num_answers = num_answers
        self._streamed = streamed
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            answering = asyncio.create_task(
                self._send_events(scope, receive, send) if self._streamed else self._send_whole(scope, receive, send)
            )
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    scope.get(OUTCOME, {}).update(_summary(answering.result()))
                else:
                    self._on_disconnect()
            finally:
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> dict[int, AnswerStats]:
        stats: dict[int, AnswerStats] = {}
        has_begun = False
        try:
            async with asyncio.timeout(self._timeout_s):
                _raise_failed(await self._stream.first(_HEAD_WAITS_S))
                has_begun = True
                await self._begin_events(send)
                async for deltas in self._stream:
                    events = [self._writer.event(delta) for delta in deltas if delta.error is None]
                    await _send_part(send, b"".join(events))
                    _raise_failed(deltas)
                    stats.update({delta.index: delta.stats for delta in deltas if delta.stats is not None})
        except (ApiError, RequestError, TimeoutError) as error:
            if not has_begun:
                await self._as_error(error)(scope, receive, send)
                return stats
            # no finish reason and no [DONE]: nobody may take this for a whole answer
            await _send_part(send, sse(bytes(self._as_error(error).body)), last=True)
            return stats
        await _send_part(send, self._writer.closing(stats) + _DONE, last=True)
        return stats

    async def _begin_events(self, send: Send) -> None:
        headers = [*_SSE_HEADERS, *(pair for pair in self.raw_headers if pair[0] != b"content-length")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, self._writer.opening())

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> dict[int, AnswerStats]:
        answers = [Answer(index) for index in range(self._num_answers)]
        try:
            async with asyncio.timeout(self._timeout_s):
                async for deltas in self._stream:
                    for delta in deltas:
                        answers[delta.index].extend(delta)
                    _raise_failed(deltas)
        except (ApiError, RequestError, TimeoutError) as error:
            await self._as_error(error)(scope, receive, send)
            return {}
        whole = Response(self._writer.whole(answers), media_type="application/json")
        whole.raw_headers += [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await whole(scope, receive, send)
        return {answer.index: answer.stats for answer in answers if answer.stats is not None}

    def _as_error(self, error: ApiError | RequestError | TimeoutError) -> Response:
        if isinstance(error, RequestError):
            told = renamed(error, self._names)
            return error_response(400, str(told), param=told.param, code=told.code)
        if isinstance(error, ApiError):
            return error_response(error.status, str(error), code=error.code)
        return error_response(504, f"the answer took longer than {self._timeout_s:g} s", code="answer_timeout")


def _summary(stats: dict[int, AnswerStats]) -> dict[str, float]:
    """What the log and traces say of the answers to one request."""
    if not stats:
        return {}
    answers = list(stats.values())
    return {
        "prompt_tokens": answers[0].prompt_tokens,
        "completion_tokens": sum(answer.completion_tokens for answer in answers),
        "cached_tokens": answers[0].cached_tokens,
        "accepted_tokens": sum(answer.accepted for answer in answers),
        "first_token_seconds": min(answer.ttft_s for answer in answers),
    }


def _raise_failed(deltas: Sequence[AnswerDelta]) -> None:
    for delta in deltas:
        if delta.refusal is not None:
            raise delta.refusal
        if delta.error is not None:
            raise ApiError(500, delta.error, code="engine_error")


async def _send_part(send: Send, body: bytes, *, last: bool = False) -> None:
    if body or last:
        await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"
