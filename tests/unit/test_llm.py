"""The offline facade's own words; what it runs is tested with the engine."""

from __future__ import annotations

import pytest

from ssd_ascend import LLM
from ssd_ascend.errors import ConfigError


def test_how_to_speculate_is_an_object_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"'speculator' is no option.*SpeculationConfig\(speculator=\.\.\.\)"):
        LLM("smollm2-135m", speculator="sd")


def test_an_option_that_is_none_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'max_model_length'.*did you mean 'max_model_len'"):
        LLM("smollm2-135m", max_model_length=64)
