"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.engine.outputs import Answer, AnswerDelta, AnswerStats
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.logprobs import TokenSpelling, chat_logprobs
from ssd_ascend.serve.protocol import ChatRequest, parse
from ssd_ascend.serve.state import ServerState, new_id, read_body
from ssd_ascend.serve.streaming import AnswerResponse, EventTemplate, encode_json, usage_of


async def chat_completions(state: ServerState, request: Request) -> Response:
    """Answer a conversation."""
    asked = parse(ChatRequest, await read_body(request))
    state.check_model(asked.model)
    sampling = asked.to_sampling()
    state.engine.require_ready()
    await state.check_grammar(asked.constraint())
    prompt = await state.encode_chat(
        asked.messages,
        add_generation_prompt=asked.add_generation_prompt is not False,
        variables=asked.chat_template_kwargs,
    )
    writer = _ChatWriter(asked, state.model_name, state.tokenizer, num_answers=sampling.n)
    try:
        stream = state.engine.generate([prompt], sampling)
    except RequestError as error:
        raise _renamed(error, {"prompt": "messages", "max_tokens": asked.max_tokens_name}) from error
    return AnswerResponse(
        stream,
        writer,
        num_answers=sampling.n,
        streamed=bool(asked.stream),
        on_disconnect=state.metrics.disconnects.inc,
    )


def _renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """The error with the field's name in this endpoint."""
    param = names.get(error.param, error.param) if error.param else None
    return RequestError(error.message, param=param, code=error.code, remedy=error.remedy)


class _ChatWriter:
    """Chat's JSON: `chat.completion`, and `chat.completion.chunk` when streamed."""

    def __init__(self, asked: ChatRequest, model: str, spelling: TokenSpelling, *, num_answers: int) -> None:
        self._asked = asked
        self._spelling = spelling
        self._n = num_answers
        self._top = asked.top_logprobs or 0
        self._head: dict[str, object] = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._template = EventTemplate(self._head, usage_is_null=asked.wants_usage_chunk)

    def opening(self) -> bytes:
        """The role of each answer."""
        start = {"role": "assistant", "content": ""}
        return b"".join([self._event(index, start) for index in range(self._n)])

    def event(self, delta: AnswerDelta) -> bytes:
        """The new text of one answer."""
        logprobs = None
        if delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._top, self._spelling)
        if not delta.text and logprobs is None and delta.finish_reason is None:
            return b""  # held back: it may become a stop string, or a whole character
        text = {"content": delta.text} if delta.text or logprobs is not None else {}
        return self._event(delta.index, text, logprobs, delta.finish_reason, delta.stop_reason)

    def _event(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, object] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        choice: dict[str, object] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._template.fill(choice)

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        """The token counts, when asked for."""
        return self._template.usage(usage_of(stats, n=self._n)) if self._asked.wants_usage_chunk else b""

    def whole(self, answers: list[Answer]) -> bytes:
        """The response that is not streamed."""
        stats = {answer.index: answer.stats for answer in answers if answer.stats is not None}
        choices = [self._choice(answer) for answer in answers]
        return encode_json({**self._head, "choices": choices, "usage": usage_of(stats, n=self._n)})

    def _choice(self, answer: Answer) -> dict[str, object]:
        logprobs = None
        if self._asked.logprobs:
            logprobs = chat_logprobs(answer.logprobs or [], self._top, self._spelling)
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
