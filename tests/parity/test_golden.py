"""A golden run survives the journey, and damage on the way is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.parity import golden as golden_file
from ssd_ascend.parity.comparing import Verdict, compare
from ssd_ascend.parity.golden import load_golden, save_golden
from tests.parity.runs import golden


def rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "golden.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    size = save_golden(golden(), tmp_path)
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir()) - 1  # the closing line break
    again = load_golden(tmp_path)
    assert (again.about, again.model, again.verdicts, again.traces) == (
        golden().about, golden().model, golden().verdicts, golden().traces,
    )  # fmt: skip
    assert list(again.tensors) == list(golden().tensors)
    assert {row.verdict for row in compare(golden(), again)} == {Verdict.EQUAL}


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: [file.unlink() for file in f.iterdir()], "no golden run"),
    "no numbers": (lambda f: (f / "golden.safetensors").unlink(), "no golden run"),
    "cut short": (lambda f: (f / "golden.json").write_text((f / "golden.json").read_text()[:200]), "is damaged"),
    "no object": (lambda f: (f / "golden.json").write_text("[]"), "holds None"),
    "another format": (lambda f: rewrite(f, lambda d: d.update(format="golden 99")), "holds 'golden 99'"),
    "a better verdict": (lambda f: rewrite(f, lambda d: d["verdicts"].update(greedy=[])), "was changed after"),
    "one bit": (lambda f: flip(f / "golden.safetensors"), "is damaged, or belongs to another run"),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damage_is_said(damage: str, tmp_path: Path) -> None:
    save_golden(golden(), tmp_path)
    do, words = DAMAGE[damage]
    do(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_golden(tmp_path)


def test_too_large_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_file, "_MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="too much to be mailed"):
        save_golden(golden(tensors={"op x": {"y": torch.zeros(1000)}}), tmp_path)
    assert not list(tmp_path.iterdir())
