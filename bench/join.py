"""Several results as one: for command lines of which each measures one mode, as the reference's do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PER_RUN = ("command", "date", "load_before", "load_after", "peak_rss_mb", "notice", "rows", "timelines")
_TOLD = ("model", "dtype", "device", "machine", "threads", "prompts", "output_len", "temperature")


def join(outcomes: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Several results as one: all rows, and of what was said of the runs that which holds for all of them.

    What else a table says of a run (its model, say) goes to the rows. A mode and batch that more than one result has
    is told apart by its result's name.
    """
    if len(outcomes) == 1:
        return dict(outcomes[0])
    common = {key: value for key, value in outcomes[0].items() if all(other.get(key) == value for other in outcomes)}
    joined = {key: value for key, value in common.items() if key not in _PER_RUN}
    notices = dict.fromkeys(str(outcome["notice"]) for outcome in outcomes if "notice" in outcome)
    labels = [f"{row.get('mode')}, batch {row.get('batch')}" for outcome in outcomes for row in outcome["rows"]]
    shared = {label for label in labels if labels.count(label) > 1}
    rows: list[dict[str, Any]] = []
    timelines: dict[str, Any] = {}
    for outcome, name in zip(outcomes, names, strict=True):
        own = {key: outcome[key] for key in _TOLD if key in outcome and key not in joined}
        rows += [row | own | _renamed(row, name, shared) for row in outcome["rows"]]
        bars = outcome.get("timelines", {})
        timelines |= {f"{label} ({name})" if label in shared else label: found for label, found in bars.items()}
    return {
        "machine": "several machines",
        **joined,
        **({"notice": "\n".join(notices)} if notices else {}),
        **{key: max(outcome.get(key, 0.0) for outcome in outcomes) for key in ("load_before", "load_after")},
        "commands": [outcome.get("command") for outcome in outcomes],
        "rows": rows,
        "timelines": timelines,
    }


def _renamed(row: Mapping[str, Any], name: str, shared: set[str]) -> dict[str, str]:
    """Another mode for a row that is not the only one of its mode and batch."""
    mode = str(row.get("mode"))
    if f"{mode}, batch {row.get('batch')}" not in shared:
        return {}
    return {"mode": name if mode in name else f"{mode} ({name})"}
