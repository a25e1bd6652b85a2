"""POST /v1/completions: text that goes on from one or more prompts, given as text or as token ids."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.engine.answers import Answer, AnswerDelta, AnswerStats
from ssd_ascend.serve.encoding import encode_json
from ssd_ascend.serve.logprobs import TokenSpelling, completion_logprobs
from ssd_ascend.serve.protocol import CompletionRequest
from ssd_ascend.serve.state import ServerState, new_id
from ssd_ascend.serve.streaming import EventTemplate, usage_of
from ssd_ascend.serve.strict import parse


async def completions(state: ServerState, request: Request) -> Response:
    """Continue prompts."""
    asked = parse(CompletionRequest, await state.read_body(request))
    state.check_model(asked.model)
    sampling = asked.to_sampling()
    state.engine.require_ready()
    await state.check_grammar(asked.constraint())
    texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
    prompts = await state.encode(texts) if texts else [ids for ids in asked.prompts if not isinstance(ids, str)]
    echoed = [""] * len(prompts)
    if asked.echo:
        echoed = texts or [state.tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]
    writer = _CompletionWriter(asked, state.model_name, state.tokenizer, n=sampling.n, echoed=echoed)
    return state.respond(
        state.generate(prompts, sampling, continuation=True),
        writer,
        num_answers=len(prompts) * sampling.n,
        streamed=bool(asked.stream),
    )


class _CompletionWriter:
    """The JSON of `text_completion`, whole or in chunks. `echoed` is what each prompt's answers begin with."""

    def __init__(
        self, asked: CompletionRequest, model: str, spelling: TokenSpelling, *, n: int, echoed: list[str]
    ) -> None:
        self._asked = asked
        self._spelling = spelling
        self._n = n
        self._echoed = echoed
        self._head: dict[str, object] = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._template = EventTemplate(self._head, usage_is_null=asked.wants_usage_chunk)

    def opening(self) -> bytes:
        """The prompts, when they are to be echoed."""
        starts = [
            (prompt * self._n + index, text) for prompt, text in enumerate(self._echoed) for index in range(self._n)
        ]
        return b"".join([self._template.fill(_choice(index, text)) for index, text in starts if text])

    def event(self, delta: AnswerDelta) -> bytes:
        """The new text of one answer."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return b""  # held back: it may become a stop string, or a whole character
        return self._template.fill(_choice(delta.index, delta.text, self._logprobs(delta), delta))

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        """The token counts, when asked for."""
        return self._template.usage(usage_of(stats, n=self._n)) if self._asked.wants_usage_chunk else b""

    def whole(self, answers: list[Answer]) -> bytes:
        """The response that is not streamed."""
        stats = {answer.index: answer.stats for answer in answers if answer.stats is not None}
        choices = [
            _choice(answer.index, self._echoed[answer.index // self._n] + answer.text, self._logprobs(answer), answer)
            for answer in answers
        ]
        return encode_json({**self._head, "choices": choices, "usage": usage_of(stats, n=self._n)})

    def _logprobs(self, piece: AnswerDelta | Answer) -> dict[str, object] | None:
        if self._asked.logprobs is None or not piece.logprobs:
            return None
        return completion_logprobs(piece.logprobs, piece.offsets, self._asked.logprobs, self._spelling)


def _choice(
    index: int, text: str, logprobs: dict[str, object] | None = None, end: AnswerDelta | Answer | None = None
) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if end is None else end.finish_reason,
    }
    if end is not None and end.stop_reason is not None:
        choice["stop_reason"] = end.stop_reason
    return choice
