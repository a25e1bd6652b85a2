"""Flags become a configuration: a flag beats the environment, which beats a preset; what cannot be meant is refused."""

from __future__ import annotations

import argparse
import math

import pytest

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError
from ssd_ascend.flags import add_engine_arguments, engine_config


def parsed(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config(parser.parse_args(flags))


def test_a_preset_is_served_under_the_name_it_was_asked_for() -> None:
    """What the README's request says must be what the server answers to."""
    config = parsed("--model", "smollm2-135m")
    assert (config.model, config.served_model_name) == ("smollm2-135m", None)
    assert config.max_model_len == 8192


def test_a_flag_beats_the_environment_which_beats_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--model", "llama-3.1-8b-eagle3", "--speculator", "sd")
    assert parsed(*flags).speculation.draft == "llama-3.1-8b-eagle3"
    monkeypatch.setenv("SSD_DRAFT_MODEL", "from-environment")
    assert parsed(*flags).speculation.draft == "from-environment"
    assert parsed(*flags, "--draft", "from-flag").speculation.draft == "from-flag"
    monkeypatch.setenv("SSD_TARGET_MODEL", "some/model")
    assert parsed().model == "some/model"


def test_no_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        parsed()


def test_a_draft_that_nobody_uses_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no speculator uses it"):
        parsed("--model", "m", "--draft", "d")


def test_lookahead_and_fan_out_take_numbers_lists_and_auto() -> None:
    config = parsed("--model", "m", "--speculator", "ssd", "--lookahead", "3", "--fan-out", "4,3,2,1").speculation
    assert (config.lookahead, config.fan_out) == (3, (4, 3, 2, 1))
    config = parsed("--model", "m", "--lookahead", "auto", "--fan-out", "auto").speculation
    assert (config.lookahead, config.fan_out) == ("auto", "auto")


@pytest.mark.parametrize("flag", ["--lookahead", "--fan-out"])
def test_what_is_no_number_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--model", "m", flag, "x")
    assert f"argument {flag}: 'x' is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-cache-gb", "nan"),
        ("--kv-cache-gb", "0"),
        ("--threads", "0"),
        ("--num-kv-blocks", "-1"),
        ("--draft-threads", "0"),
        ("--max-model-len", "1"),
        ("--lookahead", "0"),
        ("--cache-bias", "0"),
        ("--speculator", "ssd", "--lookahead", "3", "--fan-out", "1,2"),
        ("--speculator", "sd", "--max-num-seqs", "400", "--max-batched-tokens", "2000"),
    ],
    ids=" ".join,
)
def test_numbers_that_cannot_work_are_refused_with_a_remedy(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        parsed("--model", "m", *flags)
    assert error.value.remedy


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=1e-300).greedy
    assert not SamplingParams(temperature=1e-3).greedy
    assert math.isclose(SamplingParams(temperature=0.7).temperature, 0.7)
