"""The offline facade's own words; what it runs is tested with the engine."""

from __future__ import annotations

import pytest

from ssd_ascend import LLM, SamplingParams, llm
from ssd_ascend.errors import ConfigError


def test_how_to_speculate_is_an_object_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"'speculator' is no option.*SpeculationConfig\(speculator=\.\.\.\)"):
        LLM("smollm2-135m", speculator="sd")


def test_an_option_that_is_none_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'max_model_length'.*did you mean 'max_model_len'"):
        LLM("smollm2-135m", max_model_length=64)


def test_the_engines_seed_seeds_what_brings_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "build_engine", lambda config, progress: None)

    def seeds(seed: int | None) -> list[int | None]:
        outputs = LLM("smollm2-135m", seed=seed)._outputs
        return [outputs.add([1], SamplingParams()).requests[0].sampling.seed for _ in range(3)]

    assert seeds(7) == seeds(7)
    assert not set(seeds(7)) & set(seeds(8))
    assert seeds(None) != seeds(None)
