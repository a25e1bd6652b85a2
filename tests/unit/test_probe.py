"""`doctor --probe`: a sound device passes, a broken one is caught with what to switch off, and both files say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend import doctor
from ssd_ascend.backends.base import Backend, Finding
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.probe import links, operators, report, steps
from ssd_ascend.probe.report import Probe, Section, as_markdown


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("cpu")


def states(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


def test_a_sound_device_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--probe", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["failed"] == 0
    assert found["device"].startswith("cpu: ")
    assert found["versions"]["torch"] == torch.__version__
    answers = {item["name"]: item for section in found["sections"].values() for item in section}
    assert answers["attention verify 16"]["state"] == "ok"
    assert "us one way" in answers["send and receive, 64 bytes"]["detail"]
    text = (tmp_path / "probe.md").read_text()
    assert "To switch off" not in text
    assert "emulated" not in text
    assert text in capsys.readouterr().out


def test_a_wrong_operator_and_one_that_raises_are_caught(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nand a page of words")

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name == "rms_norm":
                return lambda x, weight, eps: backend.ops.rms_norm(x, weight, eps) + 0.2
            return gone if name == "rotary" else getattr(backend.ops, name)

    broken = load_backend("cpu")
    broken.ops = Broken()  # type: ignore[assignment]
    found = {f.name: f for f in operators.examine(broken, backend, torch.device("cpu"))}
    assert {name for name, finding in found.items() if finding.state == "failed"} == {"rms norm", "rotary"}
    assert found["rotary"].detail == "no such kernel"
    assert "do not serve" in found["rms norm"].remedy


def test_replays_that_disagree_are_caught(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    if not backend.capabilities.graphs:
        pytest.skip("no graphs on this machine")
    assert states(steps.examine(backend, torch.device("cpu")))["replays equal eager steps"] == "ok"
    right = steps._step
    monkeypatch.setattr(steps, "_step", lambda r, turn, staging: right(r, turn if turn != 7 or staging else 8, staging))
    found = {f.name: f for f in steps.examine(backend, torch.device("cpu"))}["replays equal eager steps"]
    assert (found.state, found.detail[:4]) == ("failed", "1 of")
    assert "--no-graphs" in found.remedy


def test_ranks_that_fail_are_a_finding(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.setattr(links, "_rank", fail)
    found = list(links.examine(backend))
    assert [(f.name, f.state) for f in found] == [("two ranks", "failed")]
    assert "the cable is out" in found[0].detail


def fail(rank: int, name: str, folder: str) -> None:
    raise RuntimeError("the cable is out")


def test_failures_come_first_and_emulation_is_said() -> None:
    failed = Finding("x", "failed", "a|b", "switch x off")
    found = Probe("npu: X (emulated)", "2026-01-01", {"torch": "2"}, (Section("S", (Finding("y", "ok", ""), failed)),))
    text = as_markdown(found)
    assert "**emulated**" in text
    assert text.index("- **x**: a|b. switch x off.") < text.index("| y | ok |")
    assert "| x | failed | a/b |" in text
    assert report.as_data(found)["failed"] == 1


def test_a_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--probe", "--device", "abacus", "--out", str(tmp_path)]) == 2
    assert "abacus" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
