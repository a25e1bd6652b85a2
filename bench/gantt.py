"""The Gantt picture: consecutive rounds of target and speculator on one time axis. Called by `bench/plots.py`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.timeline import PARTS

_COLOURS = {
    "schedule": "#b8c4d6", "draft": "#e07a5f", "wait": "#f2cc8f", "inputs": "#81b29a", "forward": "#3d5a80",
    "meanwhile": "#b5cbd9", "verify": "#6f9fc0", "observe": "#9d8189", "commit": "#6d6875",
}  # fmt: skip
_LANES = ("target", "speculator")
_HEIGHT = 0.62
_LEGIBLE = 0.03
"""Rounds narrower than this share of the picture have no room for words."""


def draw(axes: Any, name: str, bars: Sequence[Mapping[str, Any]]) -> bool:
    """One lane each for target and speculator; rounds are told apart by shading, and say what they brought."""
    if not bars:
        return False
    lanes = [lane for lane in _LANES if any(bar["who"] == lane for bar in bars)]
    _shade(axes, bars)
    for bar in bars:
        axes.barh(lanes.index(bar["who"]), bar["ms"], left=bar["from_ms"], height=_HEIGHT, color=_COLOURS[bar["what"]],
                  edgecolor="white", linewidth=0.4)  # fmt: skip
    end = _end(bars)
    for left, right, verdict in _verdicts(bars):
        if right - left > _LEGIBLE * end:
            axes.text((left + right) / 2, -0.36, verdict, ha="center", va="bottom", fontsize=8, color="#404040")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(title=f"Consecutive rounds: {name}", xlabel="milliseconds", ylim=(len(lanes) - 0.5, -0.75), xlim=(0, end))
    _legend(axes, [part for part in PARTS if any(bar["what"] == part for bar in bars)])
    return True


def _shade(axes: Any, bars: Sequence[Mapping[str, Any]]) -> None:
    """Every second round of the target on a light ground."""
    for left, right in _spans(bars)[1::2]:
        axes.axvspan(left, right, color="#f4f4f4", zorder=0)


def _verdicts(bars: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """Of each round: where it begins and ends, and the tokens it brought."""
    said = [f"+{bar['tokens']}" + ("\nhit" if bar["hit"] else "") for bar in bars if "tokens" in bar]
    return [(left, right, text) for (left, right), text in zip(_spans(bars), said, strict=False)]


def _spans(bars: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Where the rounds of the target begin and end."""
    starts: dict[int, float] = {}
    for bar in bars:
        if bar["who"] == "target":
            starts.setdefault(bar["round"], bar["from_ms"])
    return list(itertools.pairwise([*starts.values(), _end(bars)]))


def _end(bars: Sequence[Mapping[str, Any]]) -> float:
    return float(max(bar["from_ms"] + bar["ms"] for bar in bars))


def _legend(axes: Any, parts: Sequence[str]) -> None:
    handles = [axes.barh(0, 0, color=_COLOURS[part], label=part) for part in parts]
    axes.legend(handles=handles, frameon=False, ncols=len(parts), loc="upper center", bbox_to_anchor=(0.5, -0.14),
                fontsize=8)  # fmt: skip
