"""The benchmark's prompts, data sets and command lines: all that needs no engine."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from bench import cases, reference_line
from bench.command import build_parser, main
from ssd_ascend import catalogue
from ssd_ascend.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSD_DATASET_DIR", "SSD_TARGET_MODEL", "SSD_DRAFT_MODEL", "SSD_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def translated(line: str, num_devices: int | None = None) -> tuple[argparse.Namespace, list[str]]:
    args = build_parser().parse_args(line.split())
    return args, reference_line.translate(args, num_devices=num_devices)


# -- prompts --------------------------------------------------------------------------------------------


def test_sixty_four_different_prompts_are_built_in() -> None:
    texts = [text for kind in cases.KINDS for text in cases.built_in(kind).texts]
    assert len(texts) == len(set(texts)) == 64


def test_more_prompts_than_there_are_is_said() -> None:
    few = cases.built_in("code", 20)
    assert len(few.texts) == 16
    assert few.notice == "code: 20 prompts asked for, 16 built in"
    assert cases.built_in("code", 3).notice is None


def test_a_data_set_is_read_as_the_reference_lays_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gsm8k" / "gsm8k_data_10000.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"text": f"question {i}"}) + "\n" for i in range(5)))
    monkeypatch.setenv("SSD_DATASET_DIR", str(tmp_path))
    assert cases.data_set("gsm8k", 2).texts == ["question 0", "question 1"]
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "alpaca" / "alpaca_data_10000.jsonl"))):
        cases.data_set("alpaca", 2)


def test_without_a_folder_of_data_sets_own_prompts_stand_in() -> None:
    own = cases.data_set("humaneval", 2)
    assert own.texts == cases.built_in("code", 2).texts
    assert own.notice is not None
    assert "SSD_DATASET_DIR" in own.notice


@pytest.mark.parametrize(
    ("content", "reason"), [("", "holds no prompts"), ("{", "line 1 is no JSON"), ('{"x": 1}', 'line 1 has no "text"')]
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        cases.read_texts(tmp_path / "x.jsonl")


def test_random_prompts_repeat_themselves_and_have_their_length() -> None:
    first = cases.random_cases(3, 7, 50)
    assert first == cases.random_cases(3, 7, 50) != cases.random_cases(3, 7, 50, seed=1)
    assert all(len(case.token_ids) == 7 and max(case.token_ids) < 50 for case in first)


def test_random_tokens_stand_in_for_texts_kind_by_kind_and_about_as_long() -> None:
    groups = [cases.Texts("a", ["x" * 40, "x" * 8]), cases.Texts("b", ["x"])]
    drawn = cases.random_like(groups, 50)
    assert [(case.kind, len(case.token_ids)) for case in drawn] == [("a", 10), ("b", 1), ("a", 2)]
    assert drawn == cases.random_like(groups, 50)


def test_waves_are_full_and_cover_all_prompts() -> None:
    prompts = cases.random_cases(5, 2, 50)
    waves = cases.waves(prompts, 2, 2)
    assert [len(wave) for wave in waves] == [2] * 6
    assert {case for wave in waves[:3] for case in wave} == set(prompts)


# -- the reference's lines ------------------------------------------------------------------------------


def test_the_plain_line() -> None:
    args, _ = translated("--llama --size 0.135 --b 4 --temp 0 --numseqs 128 --output_len 512 --all")
    assert (args.model, args.modes, args.batch, args.prompts, args.output_len) == (
        "smollm2-135m",
        "none",
        "4",
        128,
        512,
    )
    assert args.temperature == 0
    assert args.continuous
    assert args.data_sets == ["humaneval", "alpaca", "gsm8k", "ultrafeedback"]


def test_the_synchronous_line() -> None:
    args, _ = translated("--llama --size 70 --gpus 4 --spec --k 6 --b 1", num_devices=8)
    assert (args.modes, args.drafter, args.lookahead, args.tensor_parallel) == ("sd", "model", 6, 4)
    preset = catalogue.find_preset(args.model)
    assert reference_line.size_of(preset.target) == 70
    assert preset.speculation is not None
    assert preset.speculation.drafter == "model"


def test_the_asynchronous_line_leaves_a_device_to_the_drafter() -> None:
    args, _ = translated("--llama --size 70 --gpus 5 --spec --async --k 7 --f 3 --x 0.5 --jit", num_devices=8)
    assert (args.modes, args.lookahead, args.fan_out, args.tensor_parallel) == ("ssd", 7, 3, 4)
    assert (args.cache_bias, args.on_miss) == (0.5, "draft")


def test_the_eagle_line_finds_a_preset_with_a_head_and_needs_neither_llama_nor_async() -> None:
    args, _ = translated("--qwen --size 32 --eagle --k 4 --temp 0.7")
    assert (args.modes, args.drafter, args.temperature) == ("sd", "eagle3", 0.7)
    assert args.model == "qwen3-32b-eagle3"


def test_a_sparse_model_belongs_to_its_family() -> None:
    args, _ = translated("--qwen --size 30 --spec --k 3")
    assert (args.model, args.modes, args.drafter) == ("qwen3-30b-a3b-draft-0.6b", "sd", "model")


def test_a_size_of_draft_is_a_preset_too() -> None:
    args, _ = translated("--llama --size 70 --draft 1 --spec")
    draft = catalogue.find_preset(args.draft).draft
    assert draft is not None
    assert reference_line.size_of(draft) == 1


@pytest.mark.parametrize("given", ["--flh 1 3 4", "--flh [1,3,4]", "--flh 1,3,4", "--fl 1 3 4"])
def test_fan_out_lists_in_every_spelling(given: str) -> None:
    args, _ = translated(f"--llama --size 0.135 --spec --async --k 2 {given}")
    assert args.fan_out == (1, 3, 4)


def test_what_has_no_counterpart_is_said() -> None:
    _, notices = translated(
        "--llama --size 0.135 --flm 1 2 --wandb --group g --name n --block_sz 256 --ttemp 1 --gpus 4"
    )
    ignored = {notice.split()[0] for notice in notices if "is ignored" in notice}
    assert ignored == {"--flm", "--wandb", "--group", "--name", "--block_sz", "--ttemp"} | {"--gpus"}


def test_the_environment_names_a_target_where_no_size_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_TARGET_MODEL", "smollm2-135m")
    args, notices = translated("--spec --k 3")
    assert args.draft == "smollm2-135m"
    assert any("drafts for itself" in notice for notice in notices)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--llama --size 7", "no preset of family llama has size 7; looked at .*models"),
        ("--llama --size big", "--size is 'big'"),
        ("--llama --qwen --size 8", "exclude each other"),
        ("--async --size 0.135", "add --spec or --eagle"),
        ("--model smollm2-135m --eagle", "no EAGLE-3 head is known"),
        ("--size 0.135 --draft 1 --spec", "has no draft of size 1"),
        ("--size 0.135 --spec --f x", "--f is 'x'"),
        ("--spec", "no model is named"),
    ],
)
def test_a_line_that_cannot_run_says_why(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        translated(line)


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus is 4, but this machine has 1"):
        translated("--size 70 --gpus 4", num_devices=1)


def test_our_own_lines_are_not_taken_for_the_references() -> None:
    args, notices = translated("--model smollm2-135m --modes none,sd:ngram --k 3 --batch 1,8")
    assert not hasattr(args, "continuous")
    assert (args.lookahead, args.batch, notices) == (3, "1,8", [])


def test_every_flag_of_the_reference_is_documented() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    reference_line.add_arguments(parser)
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    flags = [flag for action in parser._actions for flag in action.option_strings if flag not in ("-h", "--help")]
    assert [flag for flag in flags if f"`{flag}" not in text] == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "no model is named"),
        ("--model smollm2-135m --batch 0", "--batch is '0'"),
        ("--model nowhere", "no model 'nowhere'"),
        ("--soak 3", "--soak is 3"),
        ("--openai-url ftp://x", "is no URL of a server"),
        ("--openai-url http://127.0.0.1:9", "cannot be reached"),
        ("--model x --clients 4 --random", "random tokens cannot be sent"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(line: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    errors = [text for text in captured.err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert reason in errors[0]
    assert "Traceback" not in captured.err
