"""POST /v1/completions: text that goes on from one or more prompts, given as text or as token ids."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.engine.answers import Answer, AnswerDelta, AnswerStats
from ssd_ascend.serve.envelope import Envelope, Json
from ssd_ascend.serve.logprobs import TokenSpelling, completion_logprobs
from ssd_ascend.serve.protocol import CompletionRequest
from ssd_ascend.serve.state import ServerState


async def completions(state: ServerState, request: Request) -> Response:
    """Continue prompts."""
    asked = await state.read(CompletionRequest, request)
    state.check_model(asked.model)
    sampling, constraint = asked.to_sampling(), asked.constraint()
    state.engine.require_ready()
    await state.check_grammar(constraint)
    sampling = replace(sampling, grammar=constraint[0] if constraint else None)
    texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
    prompts = await state.encode(texts) if texts else [ids for ids in asked.prompts if not isinstance(ids, str)]
    echoed = [""] * len(prompts)
    if asked.echo:
        echoed = texts or await state.decode(prompts)
    writer = _CompletionWriter(asked, state.model_name, state.tokenizer, n=sampling.n, echoed=echoed)
    return state.respond(
        await state.generate(prompts, sampling, continuation=True),
        writer,
        num_answers=len(prompts) * sampling.n,
        streamed=bool(asked.stream),
        names={"grammar": constraint[1]} if constraint else {},
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
        self._envelope = Envelope("text_completion", model, prefix="cmpl", n=n, usage_chunk=asked.wants_usage_chunk)

    def opening(self) -> bytes:
        """The prompts, when they are to be echoed."""
        starts = [
            (prompt * self._n + index, text) for prompt, text in enumerate(self._echoed) for index in range(self._n)
        ]
        return b"".join([self._envelope.event(_choice(index, text)) for index, text in starts if text])

    def event(self, delta: AnswerDelta) -> bytes:
        """The new text of one answer."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return b""  # held back: it may become a stop string, or a whole character
        return self._envelope.event(_choice(delta.index, delta.text, self._logprobs(delta), delta))

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        """The token counts, when asked for."""
        return self._envelope.closing(stats)

    def whole(self, answers: list[Answer]) -> bytes:
        """The response that is not streamed."""
        choices = [
            _choice(answer.index, self._echoed[answer.index // self._n] + answer.text, self._logprobs(answer), answer)
            for answer in answers
        ]
        return self._envelope.whole(choices, answers)

    def _logprobs(self, piece: AnswerDelta | Answer) -> Json | None:
        if self._asked.logprobs is None or not piece.logprobs:
            return None
        return completion_logprobs(piece.logprobs, piece.offsets, self._asked.logprobs, self._spelling)


def _choice(index: int, text: str, logprobs: Json | None = None, end: AnswerDelta | Answer | None = None) -> Json:
    choice: Json = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if end is None else end.finish_reason,
    }
    if end is not None and end.stop_reason is not None:
        choice["stop_reason"] = end.stop_reason
    return choice
