"""Flags become a configuration: a flag beats the environment, which beats a preset; what cannot be meant is refused."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from types import ModuleType

import pytest

from ssd_ascend import chat, cli, generate, speculate
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError
from ssd_ascend.flags import add_engine_arguments, engine_config
from ssd_ascend.serve.launch_flags import add_launch_arguments, check_launch_flags
from ssd_ascend.speculation.registry import DRAFTERS, SPECULATORS


def parsed(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
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
    flags = ("--model", "m", "--speculator", "ssd", "--lookahead", "auto", "--fan-out", "auto")
    config = parsed(*flags).speculation
    assert (config.lookahead, config.fan_out) == ("auto", "auto")


def test_every_registered_name_is_a_flag_and_so_is_the_place_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, registry in (("--speculator", SPECULATORS), ("--drafter", DRAFTERS)):
        for name in (*registry, "my_module:KIND"):
            assert getattr(parsed("--model", "m", "--speculator", "sd", flag, name).speculation, registry.kind) == name
        with pytest.raises(SystemExit):
            parsed("--model", "m", flag, "nothing")
        assert f"unknown {registry.kind} 'nothing'; known: " in capsys.readouterr().err


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
        ("--kv-cache-gb", "1", "--num-kv-blocks", "100"),
        ("--speculator", "ssd", "--lookahead", "3", "--fan-out", "1,2"),
        ("--speculator", "ssd", "--lookahead", "auto", "--fan-out", "3,2,1"),
        ("--engine-seed", str(2**64)),
        ("--speculator", "sd", "--max-num-seqs", "400", "--max-batched-tokens", "2000"),
    ],
    ids=" ".join,
)
def test_numbers_that_cannot_work_are_refused_with_a_remedy(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        parsed("--model", "m", *flags)
    assert error.value.remedy


SSD = ("--speculator", "ssd")
REMOTE = (*SSD, "--speculators", "10.0.0.1:7070")
CONTRADICTIONS = [
    ((*SSD, "--worker", "thread", "--worker-line", "socket"), "no line"),
    ((*SSD, "--worker", "inprocess", "--worker-line", "device"), "no line"),
    ((*SSD, "--worker", "inprocess", "--draft-device", "cpu"), "target's device"),
    ((*REMOTE, "--worker", "process"), "no worker of our own"),
    ((*REMOTE, "--worker-line", "socket"), "no worker of our own"),
    ((*REMOTE, "--draft-device", "cpu"), "no worker of our own"),
    (("--speculator", "sd", "--speculators", "10.0.0.1:7070"), "the speculator is 'sd'"),
    ((*SSD, "--draft-device", "cpu:x"), "'cpu:x'"),
    ((*SSD, "--draft-device", ":1"), "':1'"),
    (("--speculator", "sd", "--worker", "process"), "--worker given"),
    (("--speculator", "sd", "--draft-device", "cpu:1"), "--draft-device given"),
    (("--speculator", "sd", "--drafter", "ngram", "--draft", "d"), "no weights"),
    (("--drafter", "ngram"), "--drafter given, but no speculator"),
    (("--lookahead", "5", "--fan-out", "3"), "--fan-out, --lookahead given, but no speculator"),
    (("--speculator", "none", "--draft", "d"), "no speculator uses it"),
    ((*SSD, "--speculators", ","), "'' is no address"),
    ((*SSD, "--speculators", "10.0.0.1:7070,"), "'' is no address"),
    ((*SSD, "--speculators", "a:7070,b:7070, A:07070"), "'A:07070' is named twice"),
    ((*SSD, "--speculators", "[::1]:7070,0:0::1:7070"), "'0:0::1:7070' is named twice"),
    *(
        ((*SSD, "--speculators", address), "is no address of a speculator .write it as host:port")
        for address in ("http://127.0.0.1:7070", "//h:7070", "me@h:7070", "a b:7070", "a:b:7070", "[h]:7070", "[::1:7")
    ),
    ((*SSD, "--worker", "thread", "--draft-device", "cpu:1"), "in a thread is on the target's device"),
    ((*SSD, "--worker", "thread", "--draft-device", "npu", "--device", "cpu"), "on the target's device, 'cpu'"),
]


@pytest.mark.parametrize(("flags", "words"), CONTRADICTIONS, ids=[" ".join(flags) for flags, _ in CONTRADICTIONS])
def test_flags_that_contradict_one_another_are_refused_with_a_remedy(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parsed("--model", "m", *flags)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--speculator", "none", "--lookahead", "5"), "--lookahead ignored"),
        (("--speculator", "sd", "--fan-out", "3", "--on-miss", "draft"), "--fan-out, --on-miss ignored"),
        (("--speculator", "sd", "--draft-rope", "auto"), "--draft-rope ignored"),
        (("--speculator", "sd", "--drafter", "ngram", "--draft-dtype", "float32"), "--draft-dtype ignored"),
        ((*REMOTE, "--cache-bias", "0.5"), "--cache-bias ignored"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_flag_without_effect_is_named_once(
    flags: tuple[str, ...], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    parsed("--model", "m", *flags)
    assert len(caplog.messages) == 1
    assert words in caplog.messages[0]


@pytest.mark.parametrize(
    "flags",
    [
        (*SSD, "--worker", "thread", "--draft-device", "cpu"),
        (*SSD, "--worker", "thread", "--draft-device", "cpu:0", "--device", "cpu"),
        ("--speculator", "sd", "--worker", "auto", "--worker-line", "auto", "--on-miss", "auto"),
        (*REMOTE, "--worker", "auto", "--draft-dtype", "auto", "--branch-lowering", "auto"),
        (*SSD, "--speculators", "[::1]:7070,fe80::1%eth0:7070,node_1.local:7070,localhost:1,[::1]:7071"),
        (*SSD, "--worker", "process", "--worker-line", "device", "--draft-device", "npu:1", "--draft-threads", "2"),
        (*SSD, "--drafter", "eagle3", "--draft", "d", "--draft-rope", "auto", "--on-miss", "ngram"),
        ("--speculator", "sd", "--drafter", "ngram", "--lookahead", "auto"),
    ],
    ids=" ".join,
)
def test_flags_that_go_together_are_taken_without_a_word(
    flags: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert parsed("--model", "m", *flags).speculation.enabled
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "m", "--replicas", "2"), "--replicas given, but no topology"),
        (("--preset", "p"), "--preset given, but no topology"),
        (("--model", "m", "--ray", "auto", "--ray-serve"), "--ray, --ray-serve given"),
        (("--topology", "t", "--preset", "p", "--model", "m"), "--model given, but --preset"),
        (("--topology", "t", "--preset", "p", "--lookahead", "3"), "--lookahead given, but --preset"),
        (("--topology", "t", "--preset", "p", "--draft-device", "cpu"), "--draft-device given, but --preset"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_plan_and_one_engine_have_flags_of_their_own(flags: tuple[str, ...], words: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_arguments(parser)
    add_launch_arguments(parser)
    with pytest.raises(ConfigError, match=words):
        check_launch_flags(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft-device", "cpu:1"], "--draft-device given, but this is the process that drafts"),
        (["--worker", "thread", "--worker-line", "auto"], "--worker given, but this"),
        (["--speculators", "h:1"], "--speculators given, but this"),
        (["--speculator", "sd"], "serves ssd, not 'sd'"),
        (["--port", "99999"], "--port is 99999 "),
    ],
)
def test_a_speculator_of_its_own_is_told_what_it_cannot_be(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speculate.main(["--model", "m", "--draft", "d", *flags]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("words", [*cli.DOORS, "parity record", "parity check"])
def test_no_door_takes_a_shortened_flag(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What it means today, another flag of the same beginning would take from it tomorrow."""
    door, *verb = words.split()
    module = importlib.import_module(
        f"ssd_ascend.{door}.__main__" if door in ("serve", "parity") else f"ssd_ascend.{door}"
    )
    with pytest.raises(SystemExit) as left:
        module.main([*verb, "--help"])
    assert left.value.code == 0
    with pytest.raises(SystemExit) as left:
        module.main([*verb, "--hel"])
    assert left.value.code == 2
    assert "ambiguous" not in capsys.readouterr().err  # what is looked up among the flags that begin so


@pytest.mark.parametrize("door", [generate, chat])
def test_the_seed_of_a_request_is_not_the_engines(door: ModuleType) -> None:
    needed = ["--model", "m", *(["--prompt", "a"] if door is generate else [])]
    for flags, seeds in (
        ([], (None, None)),
        (["--seed", "7"], (7, None)),
        (["--engine-seed", "8"], (None, 8)),
        (["--seed", "7", "--engine-seed", "8"], (7, 8)),
    ):
        args = door.parser().parse_args([*needed, *flags])
        assert (args.seed, engine_config(args).seed) == seeds


def test_generate_answers(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "smollm2-135m", "--device", "cpu", "--prompt", "The capital of France is"]
    assert generate.main([*asked, "--max-tokens", "2", "--temperature", "0", "--max-model-len", "64", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == " Paris."
    assert (answer["finish_reason"], answer["stats"]["completion_tokens"]) == ("length", 2)


def test_every_prompt_of_generate_is_answered() -> None:
    both = generate.parser().parse_args(["--model", "m", "--prompt", "a", "--prompt", "b"])
    assert generate.read_prompts(both) == ["a", "b"]
    both.chat = True
    assert generate.read_prompts(both) == [[{"role": "user", "content": text}] for text in "ab"]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=1e-300).greedy
    assert not SamplingParams(temperature=1e-3).greedy
    assert math.isclose(SamplingParams(temperature=0.7).temperature, 0.7)
