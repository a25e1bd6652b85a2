"""What `bench/two_gpus.py` found, compared and as tables; `bench.report` shows what lies on disk of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.markdown import is_number, markdown
from bench.pairs import find_pair
from bench.summary import Row

_COLUMNS = {
    "pair": "pair", "mode": "mode", "tp": "tp", "batch": "batch", "tokens/s": "tokens_per_s",
    "per card": "tokens_per_s_per_device", "ms/round": "round_ms", "on hits": "ms_per_hit_step",
    "verify": "round_verify_ms", "verify+draft": "verify_and_draft_ms", "wait": "round_wait_ms",
    "message": "round_message_ms", "host": "round_host_ms", "worker": "worker_busy_ms",
    "tokens/round": "acceptance_length", "hit rate": "hit_rate", "x none": "speedup", "x sd": "vs_sd",
    "x tp 1": "vs_one_card", "same": "same",
}  # fmt: skip
_SUM_COLUMNS = {"sum over cards": "way", "KB": "kilobytes", "us in a graph": "sum_us", "same bits": "exact"}
_LINK_COLUMNS = {"link": "link", "batch": "batch", "feature bytes": "feature_bytes", "us": "round_trip_us",
                 "p99": "round_trip_us_p99"}  # fmt: skip


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows with their ratios: to plain decoding on as many cards, to the best `sd`, and to the same on one card."""
    measured = [row for row in rows if "tokens_per_s" in row]
    return [dict(row) | _ratios(row, measured) if "tokens_per_s" in row else dict(row) for row in rows]


def _ratios(row: Row, measured: Sequence[Row]) -> Row:
    mode, tp = _mode(row), row["tp"]
    others = {
        "speedup": None if mode == "none" else _fastest(row, "none", tp, measured),
        "vs_sd": _fastest(row, "sd", tp, measured) if mode == "ssd" else None,
        "vs_one_card": _fastest(row, mode, 1, measured) if tp != 1 else None,
    }
    ratios: Row = {key: round(float(row["tokens_per_s"] or 0) / speed, 3) for key, speed in others.items() if speed}
    return ratios | ({"same": f"{row['same_answers']}/{row['answers']}"} if "answers" in row else {})


def _fastest(row: Row, mode: str, tp: object, measured: Sequence[Row]) -> float | None:
    """Tokens a second of a mode on `tp` cards: of the same target when nothing is drafted, else of the same pair."""
    target = find_pair(str(row["pair"])).target
    speeds = [
        float(other["tokens_per_s"] or 0)
        for other in measured
        if (_mode(other), other["batch"], other["tp"]) == (mode, row["batch"], tp)
        and (other["pair"] == row["pair"] or (mode == "none" and find_pair(str(other["pair"])).target == target))
    ]
    return max(speeds, default=None)


def _mode(row: Row) -> str:
    """The speculator, without the lookahead."""
    return str(row["mode"]).partition(":")[0]


def tables(outcome: Mapping[str, Any]) -> str:
    """Everything worth reading, as Markdown."""
    rows: list[Row] = outcome["rows"]
    head = f"{outcome.get('device', 'device unknown')}; synthetic weights: acceptance and hit rate are set, not learned"
    if all(is_number(outcome.get(name)) for name in ("accepted", "foreseen", "seconds")):
        head += (
            f": {outcome['accepted']:.0%} of drafts are kept and {outcome['foreseen']:.0%} of other outcomes foreseen; "
            f"{outcome['seconds']} s"
        )
    parts = [head]
    for columns, key in (
        (_COLUMNS, "tokens_per_s"), (_SUM_COLUMNS, "sum_us"), (_LINK_COLUMNS, "round_trip_us"),
    ):  # fmt: skip
        mine = [row for row in rows if key in row]
        shown = {title: name for title, name in columns.items() if any(row.get(name) is not None for row in mine)}
        if mine:
            lines = [[_cell(row.get(name)) for name in shown.values()] for row in mine]
            parts.append(markdown(list(shown), lines))
    for row in rows:
        if "skipped" in row:
            what = " ".join(str(row[key]) for key in ("pair", "mode", "link") if key in row)
            parts.append(f"- left out: {what}, tp {row.get('tp', 1)}: {row['skipped']}")
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
