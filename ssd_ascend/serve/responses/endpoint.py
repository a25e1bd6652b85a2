"""The handler of /v1/responses, and the JSON it writes: a whole response, or the events of one."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.engine.answers import Answer, AnswerDelta, AnswerStats
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.chat import Prose
from ssd_ascend.serve.chat_plan import ChatPlan, plan_chat
from ssd_ascend.serve.encoding import encode_json
from ssd_ascend.serve.errors import renamed
from ssd_ascend.serve.responses.items import Json, OutputItems, item_id
from ssd_ascend.serve.responses.request import RENAMED, ResponsesRequest
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.strict import Strict


async def responses(state: ServerState, request: Request) -> Response:
    """Answer, in the shape of the newer endpoint."""
    asked = await state.read(ResponsesRequest, request)
    state.check_model(asked.model)
    state.engine.require_ready()
    try:
        plan = await plan_chat(state, asked.to_chat())
        stream = await state.generate([plan.prompt], plan.sampling)
    except RequestError as error:
        raise renamed(error, RENAMED) from error
    return state.respond(
        stream,
        _ResponseWriter(asked, plan, state.model_name),
        num_answers=1,
        streamed=bool(asked.stream),
        names={name: RENAMED.get(ours, ours) for name, ours in plan.names.items()},
    )


class _ResponseWriter:
    """One `response` object, growing."""

    def __init__(self, asked: ResponsesRequest, plan: ChatPlan, model: str) -> None:
        self._pipeline = plan.new_pipeline() if plan.new_pipeline else Prose()
        self._items = OutputItems()
        self._number = 0
        self._ended: AnswerDelta | Answer | None = None
        sampling = plan.sampling
        self._head: Json = {
            "id": item_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": {"type": "text"}, **_given(asked.text)},
            "tool_choice": asked.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [_given(tool) for tool in asked.tools or ()],
            "truncation": "disabled",
            "store": False,
        }

    def opening(self) -> bytes:
        """The response begins."""
        begun = self._response("in_progress")
        return self._event({"type": "response.created", "response": begun}) + self._event(
            {"type": "response.in_progress", "response": begun}
        )

    def event(self, delta: AnswerDelta) -> bytes:
        """What one step brought."""
        is_last = delta.finish_reason is not None
        parts = self._pipeline.feed(delta.text, ends=delta.finish_reason)
        events = [event for part in parts for event in self._items.take(part)]
        if is_last:
            self._ended = delta
            events += self._items.close(_status(delta.finish_reason))
        return b"".join([self._event(event) for event in events])

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        """The response as a whole."""
        status = _status(self._ended.finish_reason if self._ended else None)
        return self._event({"type": f"response.{status}", "response": self._response(status, stats.get(0))})

    def whole(self, answers: list[Answer]) -> bytes:
        """The response that is not streamed."""
        (answer,) = answers
        status = _status(answer.finish_reason)
        for part in self._pipeline.feed(answer.text, ends=answer.finish_reason or "stop"):
            list(self._items.take(part))
        list(self._items.close(status))
        return encode_json(self._response(status, answer.stats))

    def _event(self, event: Json) -> bytes:
        body = encode_json({**event, "sequence_number": self._number})
        self._number += 1
        return b"event: " + str(event["type"]).encode() + b"\ndata: " + body + b"\n\n"

    def _response(self, status: str, stats: AnswerStats | None = None) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "incomplete_details": cut,
            "output": self._items.items,
            "usage": None if stats is None else _usage(stats),
        }


def _given(value: Strict | None) -> Json:
    """What the client said, to be said back."""
    return {} if value is None else value.model_dump(by_alias=True, exclude_none=True)


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(stats: AnswerStats) -> Json:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }
