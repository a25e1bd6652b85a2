"""Pictures of a result as PNG files: `bench.py --plots`, or `python -m bench.report FILE.json --plots DIR` afterwards.

Needs matplotlib (the extra `bench`), which nothing else here does.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import gantt
from ssd_ascend.errors import ConfigError

Rows = Sequence[Mapping[str, Any]]
_FAINT = "#707070"


def draw_all(outcome: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every picture that the rows have numbers for; ConfigError when matplotlib is missing."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise ConfigError("--plots needs matplotlib", remedy="pip install matplotlib, or leave --plots out") from error
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Any], bool]] = {}
    groups = _groups(outcome["rows"])
    for suffix, rows in groups.items():
        for name, paint in (("speed", _speed), ("kinds", _kinds), ("acceptance", _acceptance), ("hits", _hits),
                           ("frontier", _frontier)):  # fmt: skip
            pictures[f"{name}{suffix}"] = partial(paint, rows=rows)
    for number, (name, bars) in enumerate(outcome.get("timelines", {}).items(), 1):
        pictures[f"rounds-{number}"] = partial(gantt.draw, name=name, bars=bars)
    drawn = []
    for name, draw in pictures.items():
        figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
        if draw(axes):
            about = next((group for group in groups if group and name.endswith(group)), "").removeprefix("-")
            told = [about, *(str(outcome[key]) for key in ("model", "dtype", "device", "notice") if key in outcome)]
            figure.suptitle(_wrapped(", ".join(filter(None, told))), fontsize=9, color=_FAINT)
            axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(folder / f"{name}.png", dpi=150)
            drawn.append(folder / f"{name}.png")
        pyplot.close(figure)
    return drawn


def _wrapped(text: str) -> str:
    """Lines that fit across a picture; those that `text` has stay apart."""
    return "\n".join(textwrap.fill(line, 116) for line in text.splitlines())


def _groups(rows: Rows) -> dict[str, Rows]:
    """All rows for one set of pictures; those of `bench/two_gpus.py` by pair, with the cards in their names."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "mode" in row and "skipped" not in row:
            cards = f" tp {row['tp']}" if row.get("tp", 1) != 1 else ""
            group = groups.setdefault(f"-{row['pair']}" if "pair" in row else "", [])
            group.append({**row, "mode": f"{row['mode']}{cards}"})
    return {suffix: group for suffix, group in groups.items() if any("batch" in row for row in group)}


def _unique(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _bars(axes: Any, groups: Sequence[Any], series: Mapping[str, Mapping[Any, tuple[float, float, float]]]) -> None:
    """Groups of bars side by side, one colour a series; whiskers are the quartiles."""
    width = 0.8 / max(1, len(series))
    for place, (name, values) in enumerate(series.items()):
        known = [group for group in groups if group in values]
        at = [groups.index(group) + (place - (len(series) - 1) / 2) * width for group in known]
        heights = [values[group][0] for group in known]
        whiskers = [
            [values[group][0] - values[group][1] for group in known],
            [values[group][2] - values[group][0] for group in known],
        ]
        bars = axes.bar(at, heights, width, label=name, yerr=whiskers, capsize=3)
        axes.bar_label(bars, fmt="%.0f", padding=4, fontsize=8)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.legend(frameon=False)


def _speed(axes: Any, rows: Rows) -> bool:
    """Tokens per second by mode and batch size."""
    rows = [row for row in rows if "tokens_per_s_lo" in row]
    series: dict[str, dict[Any, tuple[float, float, float]]] = {}
    for row in rows:
        values = (row["tokens_per_s"], row["tokens_per_s_lo"], row["tokens_per_s_hi"])
        series.setdefault(row["mode"], {})[row["batch"]] = values
    if not series:
        return False
    _bars(axes, _unique(rows, "batch"), series)
    axes.set(title="Decoding", xlabel="batch size", ylabel="tokens/s, all sequences together")
    return True


def _kinds(axes: Any, rows: Rows) -> bool:
    """Tokens per second by mode and kind of prompt, at the smallest batch."""
    prefix = "tokens_per_s_"
    other = ("lo", "hi", "per_device")
    batch = min(row["batch"] for row in rows)
    rows = [row for row in rows if row["batch"] == batch]
    kinds = [key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind not in other]
    if not kinds:
        return False
    series = {row["mode"]: {kind: (row[prefix + kind],) * 3 for kind in kinds if prefix + kind in row} for row in rows}
    _bars(axes, kinds, series)
    axes.set(title=f"Decoding by kind of prompt, batch {batch}", ylabel="tokens/s of one sequence")
    return True


def _acceptance(axes: Any, rows: Rows) -> bool:
    """How often the draft at each position was kept, of those that were offered."""
    return _by_place(axes, rows, "accepted_at_", title="Acceptance by position", xlabel="position of the draft",
                     ylabel="share kept")  # fmt: skip


def _hits(axes: Any, rows: Rows) -> bool:
    """How often the speculation cache had foreseen an outcome, by how many drafts had been kept; and how many such."""
    drawn = _by_place(axes, rows, "hits_at_", title="Hit rate by depth", xlabel="drafts kept before the next token",
                      ylabel="share foreseen")  # fmt: skip
    counted = [row for row in rows if drawn and _places(row, "hits_at_")]
    for number, row in enumerate(counted):
        above = 7 if number % 2 == 0 else -14
        for place, share in _places(row, "hits_at_"):
            axes.annotate(f"{row[f'lookups_at_{place}']}", (place, share), textcoords="offset points", ha="center",
                          xytext=(0, above), fontsize=8, color=axes.lines[number].get_color())  # fmt: skip
    return drawn


def _by_place(axes: Any, rows: Rows, prefix: str, **labels: str) -> bool:
    """Shares by place, one line a row; those nobody counted are left out."""
    for row in rows:
        if points := _places(row, prefix):
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{row['mode']}, batch {row['batch']}")
    if not axes.lines:
        return False
    axes.set(**labels, ylim=(0, 1.08))
    axes.grid(axis="y", color="#e6e6e6")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower left")
    return True


def _places(row: Mapping[str, Any], prefix: str) -> list[tuple[int, float]]:
    found = {int(key.removeprefix(prefix)): row[key] for key in row if key.startswith(prefix)}
    return [(place, value) for place, value in sorted(found.items()) if value is not None]


def _frontier(axes: Any, rows: Rows) -> bool:
    """What one user sees against what all get together, over the batch size."""
    rows = [row for row in rows if "tokens_per_s_lo" in row]
    if len({row["batch"] for row in rows}) < 2:
        return False
    for mode in _unique(rows, "mode"):
        points = [(row["tokens_per_s"] / row["batch"], row["tokens_per_s"], row["batch"]) for row in rows
                  if row["mode"] == mode]  # fmt: skip
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=mode)
        for x, y, batch in points:
            axes.annotate(str(batch), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(title="Latency and throughput (numbers are batch sizes)", xlabel="tokens/s of one sequence",
             ylabel="tokens/s together")  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return True
