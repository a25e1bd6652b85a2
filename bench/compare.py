"""`python bench/compare.py BEFORE.json AFTER.json`: what became faster or slower, and whether that is more than noise.

Rows are matched by mode, batch, and the pair of models where a result has several. A ratio's band comes from the
quartiles of both sides; a change is called one only when the whole band, and the ratio by more than a floor, lie on one
side of 1. A single run has no band, nor has what clients of a server saw: ratios are told, and judged by nobody.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, where `bench` would mean bench.py

from bench.markdown import is_number, markdown
from bench.report import load
from ssd_ascend.errors import ConfigError, SsdError

_FLOOR = 0.02
"""Changes below two per cent are noise whatever the quartiles say: a few runs know them badly."""
_LESS_IS_BETTER = ("_ms", "ms_per_step", "_s")
_CLIENTS_SAW = ("tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")
_SKIPPED = ("acceptance_length", "draft_idle_ms")


@dataclass(frozen=True, slots=True)
class Change:
    """One measured number of one row, before and after."""

    row: str
    metric: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every number with a spread that both results have, row by row."""
    old = {_key(row): row for row in before["rows"]}
    changes = []
    for row in after["rows"]:
        if (match := old.get(_key(row))) is not None:
            metrics = [name for name in row if name not in _SKIPPED and _has_band(row, name) and _has_band(match, name)]
            if not metrics:
                changes += [
                    _told(row, name, match)
                    for name in _CLIENTS_SAW
                    if all(is_number(each.get(name)) and each[name] for each in (row, match))
                ]
            changes += [change for name in metrics if (change := _change(_key(row), name, match, row)) is not None]
    return changes


def _has_band(row: Mapping[str, Any], name: str) -> bool:
    return all(is_number(row.get(f"{name}{end}")) for end in ("", "_lo", "_hi"))


def _key(row: Mapping[str, Any]) -> str:
    cards = f", tp {row['tp']}" if row.get("tp", 1) != 1 else ""
    pair = f"{row['pair']}, " if "pair" in row else ""
    return f"{pair}{row.get('mode')}, batch {row.get('batch')}{cards}"


def _told(row: Mapping[str, Any], name: str, before: Mapping[str, Any]) -> Change:
    ratio = float(row[name]) / float(before[name])
    return Change(_key(row), name, before[name], row[name], ratio, ratio, ratio, "no band")


def _change(key: str, name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Change | None:
    a, a_low, a_high = (float(before[f"{name}{end}"]) for end in ("", "_lo", "_hi"))
    b, b_low, b_high = (float(after[f"{name}{end}"]) for end in ("", "_lo", "_hi"))
    if min(a, a_low, a_high, b, b_low, b_high) <= 0:
        return None
    ratio, low, high = b / a, b_low / a_high, b_high / a_low
    changed = abs(ratio - 1) > _FLOOR and (low > 1 or high < 1)
    better = (ratio < 1) == (name.endswith(_LESS_IS_BETTER) and not name.endswith("per_s"))
    verdict = "within noise" if not changed else "better" if better else "worse"
    if 1 in (before.get("runs"), after.get("runs")):
        verdict = "no band"
    return Change(key, name, a, b, ratio, low, high, verdict)


def table(changes: Sequence[Change]) -> str:
    """The changes as Markdown."""
    headers = ("row", "number", "before", "after", "after / before", "noise band", "verdict")
    lines = [
        (
            c.row,
            c.metric,
            f"{c.before:.4g}",
            f"{c.after:.4g}",
            f"{c.ratio:.3f}",
            f"{c.low:.3f}..{c.high:.3f}" if c.low < c.high else "",
            c.verdict,
        )
        for c in changes
    ]
    return markdown(headers, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0, or 1 with --fail-on-worse when something became worse; 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="compare.py", description="Compare two results of bench.py.", allow_abbrev=False
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--fail-on-worse", action="store_true", help="exit with 1 when a number became worse")
    args = parser.parse_args(argv)
    try:
        before, after = load(args.before), load(args.after)
        changes = compare(before, after)
        if not changes:
            raise ConfigError("the two results have no row in common", remedy="measure the same modes and batch sizes")
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in ("machine", "device", "model", "dtype", "output_len"):
        if before.get(name) != after.get(name):
            print(f"note: {name} differs: {before.get(name)} and {after.get(name)}", file=sys.stderr)
    print(table(changes))
    return int(args.fail_on_worse and any(change.verdict == "worse" for change in changes))


if __name__ == "__main__":
    sys.exit(main())
