"""The command as it is typed: a CPU answers as it did, another suite is refused, a wrong operator is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.parity import prompts, recording
from ssd_ascend.parity.__main__ import main
from ssd_ascend.parity.checkpoints import write_checkpoints
from ssd_ascend.parity.comparing import compare, passed
from ssd_ascend.parity.golden import load_golden, save_golden
from ssd_ascend.parity.numbers import digest, integers, normal
from ssd_ascend.text.tokenizer import Tokenizer
from tests.engine.harness import write_pair
from tests.unit.text_toys import byte_level_backend, write_directory

GOLDENS = sorted(path.parent for path in Path(__file__).parent.glob("goldens/*/golden.json"))
BUILT_IN = [path for path in GOLDENS if load_golden(path).model.source is None]
REAL = [path for path in GOLDENS if path not in BUILT_IN]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    assert main(["record", "--device", "cpu", "--out", str(folder)]) == 0
    return folder


def test_check_says_what_it_compared(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recorded), "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["golden"]["device"] == report["checked"]["device"]
    checks = {row["check"]: row["verdict"] for row in report["rows"]}
    assert {"op linear", "op attention decode", "layer 4", "logits", "drafter eagle3", "tokens plain",
            "tokens ssd eagle3", "acceptance sd model", "verdicts sampled, drawn drafts"} <= set(checks)  # fmt: skip
    assert set(checks.values()) == {"bit-equal"}


def test_every_accepted_length_and_cache_hits_occur(recorded: Path) -> None:
    traces = load_golden(recorded).traces
    lengths = {way: {accepted for trace in own for _, accepted, _ in trace.steps} for way, own in traces.items()}
    assert lengths["sd model"] == lengths["ssd model"] == {0, 1, 2, 3, 4}
    assert {0, 1, 2} <= lengths["sd eagle3"] & lengths["ssd eagle3"]
    for drafter in ("model", "eagle3"):
        assert sum(hits for trace in traces[f"ssd {drafter}"] for _, _, hits in trace.steps) > 10


@pytest.mark.parametrize("golden", BUILT_IN, ids=lambda path: path.name)
def test_the_cpu_answers_what_recorded_devices_answered(golden: Path, recorded: Path) -> None:
    rows = compare(load_golden(golden), load_golden(recorded))
    assert passed(rows), [row for row in rows if not passed([row])]


@pytest.mark.slow
@pytest.mark.parametrize("golden", REAL, ids=lambda path: path.name)
def test_the_cpu_answers_what_real_models_answered_elsewhere(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(golden), "--device", "cpu"]) == 0, capsys.readouterr().out


def test_real_models_were_recorded_too() -> None:
    assert [load_golden(path).model.source for path in REAL] == ["smollm2-135m"]
    assert all(load_golden(path).prompts for path in REAL)


def test_a_real_model_is_asked_questions_and_they_travel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who checks asks what was asked, whatever its own questions are."""
    backend = byte_level_backend()
    target = write_pair(tmp_path, "llama", vocab=backend.get_vocab_size()) / "target"
    write_directory(target, backend, eos_token="</s>")
    folder = tmp_path / "golden"
    assert main(["record", "--device", "cpu", "--model", str(target), "--out", str(folder)]) == 0
    golden = load_golden(folder)
    asked = prompts.questions(target)
    assert golden.prompts == asked
    assert asked is not None
    assert Tokenizer.load(target).decode(asked[0], skip_special_tokens=True) == "What is the capital of France?"
    save_golden(replace(golden, prompts=[[5, 6, 7], *asked[1:]]), folder)
    assert main(["check", str(folder), "--device", "cpu"]) == 1
    assert "tokens plain" in capsys.readouterr().out
    assert load_golden(folder).prompts == [[5, 6, 7], *asked[1:]]


def test_a_model_that_cannot_read_gets_numbers(tmp_path: Path) -> None:
    target = write_pair(tmp_path, "llama") / "target"
    assert prompts.questions(target) is None
    options = recording.Options(device="cpu", model=str(target))
    assert recording.record(options, lambda _: None).prompts is None


def test_a_wrong_operator_is_found(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = type(load_backend("cpu").ops)
    right = ops.silu_and_mul
    monkeypatch.setattr("ssd_ascend.parity.recording.run_all", lambda *_: [])
    monkeypatch.setattr(ops, "silu_and_mul", lambda self, x: right(self, x) * 1.1)
    assert main(["check", str(recorded), "--device", "cpu"]) == 1
    different = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if " different" in line]
    assert different[0] == ["op", "silu", "and", "mul"]


def test_nothing_to_compare_is_an_error_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path), "--device", "cpu"]) == 2
    assert "no golden run" in capsys.readouterr().err
    assert main(["record", "--out", str(tmp_path), "--draft", "x"]) == 2
    assert main(["record", "--out", str(tmp_path), "--device", "abacus"]) == 2


def test_inputs_are_the_same_bits_everywhere(tmp_path: Path) -> None:
    """Known from another machine: whoever changes the suite changes its format, too."""
    models = write_checkpoints(tmp_path)
    flat = {f"{model} {name}": tensor for model, own in models.items() for name, tensor in own.items()}
    assert digest(flat) == DIGEST
    numbers = normal("x", 100_000)
    assert abs(float(numbers.mean())) < 0.02
    assert abs(float(numbers.std()) - 1) < 0.02
    assert torch.equal(numbers, numbers.bfloat16().float())
    assert integers("y", 1000, low=3, high=9).unique().tolist() == [3, 4, 5, 6, 7, 8]


DIGEST = "8fa7d4d0c57492add515af3f340d4a6e3d7acd49d3ed1afe9d8700206cf5d812"
