"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.engine.answers import Answer, AnswerDelta, AnswerStats, stats_dict
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.chat_plan import plan_chat
from ssd_ascend.serve.envelope import Envelope, Json
from ssd_ascend.serve.errors import renamed
from ssd_ascend.serve.logprobs import TokenSpelling, chat_logprobs
from ssd_ascend.serve.parts import CallArguments, CallStart, Part, Pipeline, Reasoning, Text
from ssd_ascend.serve.protocol import ChatRequest
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.token_sources import TokenSources


async def chat_completions(state: ServerState, request: Request) -> Response:
    """Answer a conversation."""
    asked = await state.read(ChatRequest, request)
    state.check_model(asked.model)
    state.engine.require_ready()
    plan = await plan_chat(state, asked)
    writer = _ChatWriter(
        asked,
        state.model_name,
        state.tokenizer,
        num_answers=plan.sampling.n,
        new_pipeline=plan.new_pipeline,
        device=state.engine.info.device if state.engine.info else "",
    )
    try:
        stream = await state.generate([plan.prompt], plan.sampling)
    except RequestError as error:
        raise renamed(error, plan.names) from error
    return state.respond(
        stream,
        writer,
        num_answers=plan.sampling.n,
        streamed=bool(asked.stream),
        names=plan.names,
    )


class Prose(Pipeline):
    """All of the text is the answer."""

    def __init__(self) -> None:
        super().__init__(())


class _ChatWriter:
    """Chat's JSON: `chat.completion`, and `chat.completion.chunk` when streamed."""

    def __init__(
        self,
        asked: ChatRequest,
        model: str,
        spelling: TokenSpelling,
        *,
        num_answers: int,
        new_pipeline: Callable[[], Pipeline] | None,
        device: str,
    ) -> None:
        self._asked = asked
        self._spelling = spelling
        self._n = num_answers
        self._device = device
        self._top = asked.top_logprobs or 0
        self._is_prose = new_pipeline is None
        self._pipelines = defaultdict[int, Pipeline](new_pipeline or Prose)
        self._sources = defaultdict[int, TokenSources](TokenSources)
        self._called: set[int] = set()
        """Answers that have made a call."""
        self._envelope = Envelope(
            "chat.completion.chunk" if asked.stream else "chat.completion",
            model,
            prefix="chatcmpl",
            n=num_answers,
            usage_chunk=asked.wants_usage_chunk,
        )

    # -- streamed ----------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The role of each answer."""
        start: Json = {"role": "assistant", "content": ""}
        return b"".join([self._envelope.event(_chunk(index, start)) for index in range(self._n)])

    def event(self, delta: AnswerDelta) -> bytes:
        """What one step brought to one answer, as one chunk or several."""
        is_last = delta.finish_reason is not None
        if self._is_prose:
            return self._prose_event(delta, is_last=is_last)
        parts = self._pipelines[delta.index].feed(delta.text, ends=delta.finish_reason)
        self._called.update(delta.index for part in parts if isinstance(part, CallStart))
        chunks = [_chunk(delta.index, _as_delta(part)) for part in parts]
        more = self._extras(delta)
        if not chunks and (more or is_last):
            chunks = [_chunk(delta.index, {"content": ""} if delta.logprobs else {})]
        if chunks:
            chunks[0] |= more
            chunks[-1] |= self._ending(delta)
        return b"".join([self._envelope.event(chunk) for chunk in chunks])

    def _prose_event(self, delta: AnswerDelta, *, is_last: bool) -> bytes:
        """The same where all of the text is the answer: the way of most streams, so it is short."""
        more = self._extras(delta) if delta.logprobs or self._asked.return_token_sources else {}
        if not (delta.text or more or is_last):
            return b""  # held back: it may become a stop string, or a whole character
        chunk = _chunk(delta.index, {"content": delta.text} if delta.text or delta.logprobs else {})
        chunk |= more
        if is_last:
            chunk |= self._ending(delta)
        return self._envelope.event(chunk)

    def _extras(self, piece: AnswerDelta | Answer) -> Json:
        """What goes with the tokens rather than with their text."""
        more: Json = {}
        if piece.logprobs:
            more["logprobs"] = chat_logprobs(piece.logprobs, self._top, self._spelling)
        if self._asked.return_token_sources:
            if tokens := self._sources[piece.index].feed(piece):
                more["tokens"] = tokens
            if piece.stats is not None:
                more["speculation"] = stats_dict(piece.stats, device=self._device)
        return more

    def _ending(self, piece: AnswerDelta | Answer) -> Json:
        """How the answer ended, if it has."""
        called = piece.index in self._called and piece.finish_reason == "stop"
        more: Json = {"finish_reason": "tool_calls" if called else piece.finish_reason}
        if piece.stop_reason is not None:
            more["stop_reason"] = piece.stop_reason
        return more

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        """The token counts, when asked for."""
        return self._envelope.closing(stats)

    # -- whole -------------------------------------------------------------------------------------------------------

    def whole(self, answers: list[Answer]) -> bytes:
        """The response that is not streamed."""
        return self._envelope.whole([self._choice(answer) for answer in answers], answers)

    def _choice(self, answer: Answer) -> Json:
        parts = self._pipelines[answer.index].feed(answer.text, ends=answer.finish_reason or "stop")
        self._called.update(answer.index for part in parts if isinstance(part, CallStart))
        return {
            "index": answer.index,
            "message": _message(parts),
            "logprobs": chat_logprobs([], 0, self._spelling) if self._asked.logprobs else None,
            "stop_reason": answer.stop_reason,
            **self._extras(answer),
            **self._ending(answer),
        }


def _chunk(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _new_call(part: CallStart, arguments: str) -> Json:
    function = {"name": part.name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _as_delta(part: Part) -> Json:
    """One part as the `delta` of a chunk."""
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(number, _):
            return {"tool_calls": [{"index": number, **_new_call(part, "")}]}
        case CallArguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _message(parts: Sequence[Part]) -> Json:
    """All parts of an answer as one message."""
    content = "".join([part.text for part in parts if isinstance(part, Text)])
    thoughts = "".join([part.text for part in parts if isinstance(part, Reasoning)])
    arguments: dict[int, str] = defaultdict(str)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.number] += part.text
    calls = [_new_call(part, arguments[part.number]) for part in parts if isinstance(part, CallStart)]
    message: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message
