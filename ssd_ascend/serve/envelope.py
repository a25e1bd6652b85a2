"""What stands around the choices of an answer, the same in chat and in text completions: head, events, token counts.

Their writers (`chat.py`, `completions.py`) hold one for each request.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from ssd_ascend.engine.answers import Answer, AnswerStats
from ssd_ascend.serve.encoding import encode_json

Json = dict[str, object]


class Envelope:
    """One request's. The part of a stream's events that never changes is encoded once."""

    def __init__(self, kind: str, model: str, *, prefix: str, n: int, usage_chunk: bool) -> None:
        """kind: the value of `object`. prefix: of the id. n: answers to each prompt. usage_chunk: whether a stream ends
        with the token counts."""
        self._head: Json = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._n = n
        self._usage_chunk = usage_chunk
        self._before = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if usage_chunk else b"]}\n\n"

    def event(self, choice: Json) -> bytes:
        """The event of one choice."""
        return self._before + encode_json(choice) + self._after

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        """The last event, with token counts and no choice, when asked for."""
        if not self._usage_chunk:
            return b""
        return self._before + b'],"usage":' + encode_json(usage_of(stats, n=self._n)) + b"}\n\n"

    def whole(self, choices: Sequence[Json], answers: Sequence[Answer]) -> bytes:
        """The body of a response that is not streamed."""
        stats = {answer.index: answer.stats for answer in answers if answer.stats is not None}
        return encode_json({**self._head, "choices": choices, "usage": usage_of(stats, n=self._n)})


def usage_of(stats: dict[int, AnswerStats], *, n: int) -> Json:
    """OpenAI's usage object. The n answers to one prompt share it, so it counts once; drafts show as predictions."""
    prompts = [answer for number, answer in stats.items() if number % n == 0]
    prompt_tokens = sum(answer.prompt_tokens for answer in prompts)
    completion_tokens = sum(answer.completion_tokens for answer in stats.values())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(answer.accepted for answer in stats.values()),
            "rejected_prediction_tokens": sum(answer.rejected for answer in stats.values()),
        },
    }
