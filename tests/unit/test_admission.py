"""What an engine lets in: limits at their edges, and which field and number a refusal names."""

from __future__ import annotations

import pytest

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.admission import admit
from ssd_ascend.engine.identity import EngineLimits
from ssd_ascend.errors import RequestError

MODEL_BOUND = EngineLimits(max_model_len=16, max_tokens_that_fit=16, vocab_size=100)
CACHE_BOUND = EngineLimits(max_model_len=64, max_tokens_that_fit=16, vocab_size=100)


def test_max_tokens_defaults_to_what_fits() -> None:
    assert admit([1] * 10, SamplingParams(), MODEL_BOUND).max_tokens == 6
    assert admit([1] * 15, SamplingParams(), MODEL_BOUND).max_tokens == 1
    assert admit([1] * 10, SamplingParams(max_tokens=6), MODEL_BOUND).max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([1] * 16, SamplingParams(), "prompt"),
        ([1] * 17, SamplingParams(max_tokens=1), "prompt"),
        ([1] * 10, SamplingParams(max_tokens=7), "max_tokens"),
        ([100], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1], SamplingParams(logit_bias={100: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=(100,)), "stop_token_ids"),
        ([1] * 10, SamplingParams(min_tokens=7), "min_tokens"),
    ],
)
def test_refusals_name_the_field(prompt: list[int], sampling: SamplingParams, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        admit(prompt, sampling, MODEL_BOUND)
    assert refused.value.param == param


def test_the_limit_that_binds_is_the_one_named() -> None:
    for limits, words in ((MODEL_BOUND, "model's length of 16"), (CACHE_BOUND, "16 tokens that fit in the KV cache")):
        with pytest.raises(RequestError, match=words) as refused:
            admit([1] * 10, SamplingParams(max_tokens=7), limits)
        assert "at most 6" in str(refused.value)
