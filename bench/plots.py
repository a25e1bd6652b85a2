"""Pictures of a result as PNG files. Needs matplotlib (the extra `bench`), which nothing else here does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssd_ascend.errors import ConfigError

Rows = Sequence[Mapping[str, Any]]
_PARTS = ("schedule", "draft", "wait", "inputs", "forward", "verify", "observe", "commit")
"""In the order of a step; what `propose` takes beside draft and wait is a sliver and left out."""
_COLOURS = {
    "schedule": "#b8c4d6", "draft": "#e07a5f", "wait": "#f2cc8f", "inputs": "#81b29a", "forward": "#3d5a80",
    "verify": "#98c1d9", "observe": "#9d8189", "commit": "#6d6875",
}  # fmt: skip


def draw_all(outcome: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every picture that the rows have numbers for; ConfigError when matplotlib is missing."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise ConfigError("--plots needs matplotlib", remedy="pip install matplotlib, or leave --plots out") from error
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    pictures: dict[str, Callable[[Any, Rows], bool]] = {
        "speed": _speed, "kinds": _kinds, "acceptance": _acceptance, "round": _round, "frontier": _frontier,
    }  # fmt: skip
    for name, draw in pictures.items():
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        if draw(axes, outcome["rows"]):
            figure.suptitle(f"{outcome.get('model')}, {outcome.get('dtype')}, {outcome.get('device')}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(folder / f"{name}.png", dpi=150)
            drawn.append(folder / f"{name}.png")
        pyplot.close(figure)
    return drawn


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
    """Tokens per second by mode and kind of prompt, at batch 1."""
    prefix = "tokens_per_s_"
    other = ("lo", "hi", "per_device")
    rows = [row for row in rows if row["batch"] == 1]
    kinds = [key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind not in other]
    if not kinds:
        return False
    series = {row["mode"]: {kind: (row[prefix + kind],) * 3 for kind in kinds if prefix + kind in row} for row in rows}
    _bars(axes, kinds, series)
    axes.set(title="Decoding by kind of prompt, batch 1", ylabel="tokens/s")
    return True


def _acceptance(axes: Any, rows: Rows) -> bool:
    """How often the draft at each position was accepted."""
    for row in rows:
        values = {int(key.rpartition("_")[2]): row[key] for key in row if key.startswith("accepted_at_")}
        points = [(place, value) for place, value in sorted(values.items()) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{row['mode']}, batch {row['batch']}")
    if not axes.lines:
        return False
    axes.set(title="Acceptance", xlabel="position of the draft", ylabel="share accepted", ylim=(0, 1.05))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return True


def _round(axes: Any, rows: Rows) -> bool:
    """The mean decode step of each mode as a time line, and below it what an ssd drafter did meanwhile."""
    traced = [row for row in rows if "forward_ms" in row and row["batch"] == rows[0]["batch"]]
    if not traced:
        return False
    names: list[str] = []
    for row in traced:
        start = 0.0
        for part in _PARTS:
            length = row.get(f"{part}_ms") or 0.0
            label = part if not any(part == text for text in axes.get_legend_handles_labels()[1]) else None
            axes.barh(len(names), length, left=start, color=_COLOURS[part], label=label, height=0.6)
            start += length
        names.append(f"{row['mode']}: target")
        if "draft_idle_ms" in row:
            idle = min(start, row["draft_idle_ms"])
            axes.barh(len(names), start - idle, color=_COLOURS["draft"], height=0.35)
            names.append(f"{row['mode']}: speculator")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(title=f"A mean decode step, batch {traced[0]['batch']}", xlabel="milliseconds")
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return True


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
    axes.legend(frameon=False)
    return True
