"""All questions to one device, and the answers as JSON and Markdown. Called by `doctor`."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd_ascend.backends.base import Backend, Examinable, Finding
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.probe import links, operators, rates, steps


@dataclass(frozen=True, slots=True)
class Section:
    """The answers to one kind of question."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """All that was asked of one device."""

    device: str
    date: str
    versions: dict[str, str]
    sections: tuple[Section, ...]

    @property
    def failures(self) -> list[Finding]:
        """What must be switched off, or kept from being used."""
        return [finding for section in self.sections for finding in section.findings if finding.state == "failed"]


def probe(name: str | None, versions: dict[str, str], tell: Callable[[str], None]) -> Probe:
    """Ask one device everything. ConfigError when there is none of that name."""
    backend = load_backend(name)
    device = backend.device(0)
    questions: dict[str, Callable[[], Iterator[Finding]]] = {
        "Operators": lambda: operators.examine(backend, load_backend("cpu"), device),
        "Memory and copies": lambda: rates.examine(backend, device),
        "Captured steps": lambda: steps.examine(backend, device),
        "Two ranks": lambda: links.examine(backend),
    }
    if isinstance(backend, Examinable):
        questions["What this device has of its own"] = lambda: _own(backend, device)
    sections = []
    for title, ask in questions.items():
        tell(title.lower())
        sections.append(Section(title, tuple(ask())))
    return Probe(backend.describe(device), time.strftime("%Y-%m-%d"), versions, tuple(sections))


def _own(backend: Backend, device: torch.device) -> Iterator[Finding]:
    assert isinstance(backend, Examinable)
    return backend.examine(device)


def write(found: Probe, folder: Path) -> tuple[Path, Path]:
    """probe.json and probe.md in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "probe.json", folder / "probe.md"
    data.write_text(json.dumps(as_data(found), indent=1) + "\n", encoding="utf-8")
    text.write_text(as_markdown(found), encoding="utf-8")
    return data, text


def as_data(found: Probe) -> dict[str, object]:
    """For programs."""
    return {
        "device": found.device,
        "date": found.date,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": found.versions,
        "sections": {section.title: [item._asdict() for item in section.findings] for section in found.sections},
        "failed": len(found.failures),
    }


def as_markdown(found: Probe) -> str:
    """For people: what failed and what to do first, then everything."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines = [f"# {found.device}", "", f"{found.date}, {platform.system()} {platform.machine()}, {versions}", ""]
    if "(emulated)" in found.device:
        lines += [
            "This device is **emulated**: what is right here is right by its documents, and no time means anything.",
            "",
        ]
    if found.failures:
        lines += ["## To switch off", ""]
        lines += [f"- **{item.name}**: {item.detail}. {item.remedy}." for item in found.failures]
        lines.append("")
    for section in found.sections:
        lines += [f"## {section.title}", "", "| what | state | |", "|---|---|---|"]
        lines += [f"| {item.name} | {item.state} | {item.detail.replace('|', '/')} |" for item in section.findings]
        lines.append("")
    return "\n".join(lines)
