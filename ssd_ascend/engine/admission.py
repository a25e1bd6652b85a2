"""Whether a request can be served at all, asked before it is queued, so that the answer is a 400 and not a late error.

Called by `engine/async_engine.py`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.identity import EngineLimits
from ssd_ascend.errors import RequestError


def admit(prompt_token_ids: Sequence[int], sampling: SamplingParams, limits: EngineLimits) -> SamplingParams:
    """`sampling` with max_tokens filled in (as many as fit). Raises RequestError naming the field and the limit."""
    _check_ids("prompt", prompt_token_ids, limits)
    _check_ids("logit_bias", sampling.logit_bias, limits)
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits)
    length, room = len(prompt_token_ids), limits.max_tokens_that_fit
    if length == 0:
        raise RequestError("the prompt has no tokens", param="prompt", remedy="send at least one")
    bound = (
        f"the model's length of {limits.max_model_len} tokens"
        if room >= limits.max_model_len
        else f"the {room} tokens that fit in the KV cache"
    )
    if length >= room:
        raise RequestError(
            f"the prompt has {length} tokens, which leaves no room for an answer within {bound}",
            param="prompt",
            code="context_length_exceeded",
            remedy="shorten the prompt",
        )
    if sampling.max_tokens is None:
        return replace(sampling, max_tokens=room - length)
    if length + sampling.max_tokens > room:
        raise RequestError(
            f"{length} prompt tokens and max_tokens {sampling.max_tokens} make {length + sampling.max_tokens}, "
            f"which is over {bound}",
            param="max_tokens",
            code="context_length_exceeded",
            remedy=f"ask for at most {room - length}, or leave max_tokens out",
        )
    return sampling


def _check_ids(param: str, token_ids: Collection[int], limits: EngineLimits) -> None:
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if lowest < 0 or highest >= limits.vocab_size:
        token = next(token for token in token_ids if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"token {token} is outside the vocabulary of {limits.vocab_size}",
            param=param,
            remedy=f"use ids from 0 to {limits.vocab_size - 1}",
        )
