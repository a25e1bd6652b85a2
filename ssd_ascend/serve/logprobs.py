"""Log-probabilities in the two shapes of the OpenAI API: chat's list of objects, and completions' parallel lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ssd_ascend.core.speculation import TokenLogprobs

_FLOOR = -9999.0
"""What JSON gets for a probability of zero: it has no infinity."""


class TokenSpelling(Protocol):
    """What a token looks like by itself."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...


def chat_logprobs(tokens: Sequence[TokenLogprobs], num_top: int, spelling: TokenSpelling) -> dict[str, object]:
    """Chat's shape: per token its text, log-probability, bytes, and the `num_top` most likely alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": spelling.token_text(token_id),
            "logprob": max(logprob, _FLOOR),
            "bytes": list(spelling.token_bytes(token_id)),
        }

    content = [
        {**entry(token.token, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top[:num_top]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], offsets: Sequence[int], num_top: int, spelling: TokenSpelling
) -> dict[str, object]:
    """Completions' shape; the chosen token is among the alternatives even when it is not one of the most likely."""
    alternatives = []
    for token in tokens:
        top: dict[str, float] = {}
        for other, logprob in (*token.top[:num_top], (token.token, token.logprob)):
            top.setdefault(spelling.token_text(other), max(logprob, _FLOOR))  # two tokens may look alike: the likelier
        alternatives.append(top)
    return {
        "tokens": [spelling.token_text(token.token) for token in tokens],
        "token_logprobs": [max(token.logprob, _FLOOR) for token in tokens],
        "top_logprobs": alternatives if num_top else None,
        "text_offset": list(offsets),
    }
