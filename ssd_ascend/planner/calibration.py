"""A topology file with what a machine really reached written into it: `plan --calibrate` calls this with the numbers.

The file stays the user's text: only its name, a source and the `[calibrated]` section are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ssd_ascend.config.figures import Figure
from ssd_ascend.config.topology import Calibrated, Topology, load_topology
from ssd_ascend.errors import ConfigError

_SOURCE: Final = "probe"
_SECTION: Final = re.compile(r"^\[calibrated[^\n]*\n(?:(?!\[).*\n?)*", re.MULTILINE)
_NAME: Final = re.compile(r'^name = "[^"\n]*"', re.MULTILINE)
_OLD_SOURCE: Final = re.compile(rf"^{_SOURCE} = .*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a probe found. Keys are those of `[calibrated]`, and of its `links` by level; notes say how."""

    machine: str
    date: str
    figures: Mapping[str, float]
    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def write_calibrated(original: Path, out: Path, measured: Measured) -> Topology:
    """Write `original` to `out` with `measured` in it, and read it back. ConfigError when that is no topology."""
    check_name(out)
    out.write_text(calibrated_text(original.read_text(encoding="utf-8"), out.stem, measured), encoding="utf-8")
    return load_topology(out)


def check_name(out: Path) -> None:
    """ConfigError for a file that could not be given as a topology."""
    if out.suffix != ".toml":
        raise ConfigError(f"{out} is no name for a topology", remedy="call it NAME.toml")


def calibrated_text(text: str, name: str, measured: Measured) -> str:
    """The text of a topology file with `[calibrated]` at its end, in place of one that was there."""
    text = _OLD_SOURCE.sub("", _SECTION.sub("", text)).rstrip() + "\n"
    text = _NAME.sub(f'name = "{name}"', text, count=1)
    how = f"our own measurement: plan --calibrate on {measured.machine}, {measured.date}"
    text = text.replace("[sources]\n", f'[sources]\n{_SOURCE} = "{_plain(how)}"\n', 1)
    lines = ["", "[calibrated]", f'machine = "{_plain(measured.machine)}"', f'date = "{measured.date}"']
    lines += [f"{key} = {_figure(value, measured.notes.get(key))}" for key, value in measured.figures.items()]
    for level, link in measured.links.items():
        lines += ["", f"[calibrated.links.{level}]"]
        lines += [f"{key} = {_figure(value, measured.notes.get(key))}" for key, value in link.items()]
    return text + "\n".join(lines) + "\n"


def figures_of(calibrated: Calibrated) -> dict[str, Figure]:
    """Every figure of a `[calibrated]` section, by its key."""
    found = {name: getattr(calibrated, name) for name in calibrated.__dataclass_fields__}
    for level, link in calibrated.links.items():
        found |= {f"links.{level}.{name}": getattr(link, name) for name in link.__dataclass_fields__}
    return {name: value for name, value in found.items() if isinstance(value, Figure)}


def _figure(value: float, note: str | None) -> str:
    more = f', note = "{_plain(note)}"' if note else ""
    return f'{{ value = {float(f"{value:.4g}")}, source = "{_SOURCE}", confidence = "measured"{more} }}'


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")
