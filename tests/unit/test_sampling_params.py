"""What a request may ask of the sampler: the quick look at many biases refuses what the slow one would, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import RequestError

MANY = dict.fromkeys(range(1000), 0.5)
OTHERS = dict.fromkeys(range(10, 1000), 0.5)


@pytest.mark.parametrize("key", [-1, (1 << 31) + 1, True, "5", 5.0, None])
@pytest.mark.parametrize("others", [{}, OTHERS])
def test_a_bias_of_no_token_is_told_as_its_key(key: Any, others: dict[int, float]) -> None:
    with pytest.raises(RequestError, match=r"logit_bias has the key .*: a key must be a token id") as refused:
        SamplingParams(logit_bias={key: 1.0, **others})
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize(
    "bias", [100.5, -101, math.nan, math.inf, -math.inf, pytest.param(10**400, id="huge"), True, "1", None]
)
@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_bias_that_is_none_is_found_wherever_it_stands(bias: Any, place: int) -> None:
    with pytest.raises(RequestError, match="logit_bias is") as refused:
        SamplingParams(logit_bias={**MANY, place: bias})
    assert refused.value.param == "logit_bias"


def test_biases_from_edge_to_edge_are_taken() -> None:
    biases = {0: -100, 1 << 31: 100.0, 5: 0}
    assert SamplingParams(logit_bias=biases).logit_bias == biases


@pytest.mark.parametrize("stop", [("a",) * 17, ("a", "b" * 1025), ("",)])
def test_stop_strings_are_few_and_short(stop: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="stop") as refused:
        SamplingParams(stop=stop)
    assert refused.value.param == "stop"
    assert len(str(refused.value)) < 200
    assert SamplingParams(stop=("b" * 1024,) * 16).stop[0] == "b" * 1024


def test_stop_tokens_are_few() -> None:
    with pytest.raises(RequestError, match="1025 tokens") as refused:
        SamplingParams(stop_token_ids=tuple(range(1025)))
    assert refused.value.param == "stop_token_ids"
