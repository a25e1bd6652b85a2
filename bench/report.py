"""A benchmark's result: one JSON file, and tables in plain Markdown that need no package.

`python -m bench.report A.json B.json ...` makes tables and pictures of results that lie there.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import pair_report
from bench.join import join
from bench.markdown import is_number, markdown
from bench.summary import SPANS, Row
from ssd_ascend.errors import ConfigError, SsdError

_PACKAGES = ("ssd-ascend", "torch", "transformers", "numpy")
_COLUMNS: tuple[tuple[str, str], ...] = (
    ("mode", "mode"),
    ("batch", "batch"),
    ("tokens/s", "tokens_per_s"),
    ("per device", "tokens_per_s_per_device"),
    ("ms/step", "ms_per_step"),
    ("of floor", "share_of_floor"),
    ("host ms", "host_ms"),
    ("launches", "launches_per_step"),
    ("first token ms", "ttft_ms"),
    ("tokens/step", "acceptance_length"),
    ("hit rate", "hit_rate"),
    ("x none", "speedup"),
    ("x transformers", "vs_transformers"),
    ("same answers", "same_answers"),
)


def result(rows: Sequence[Row], *, device: str, load: tuple[float, float], **more: Any) -> dict[str, Any]:
    """The JSON object of a run. `load` is the machine's load average before and after: near 0 before means quiet."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "device": device,
        "versions": versions(),
        "load_before": round(load[0], 2),
        "load_after": round(load[1], 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        **more,
        "rows": list(rows),
    }


def load_average() -> float:
    """Processes that wanted a core during the last minute."""
    return os.getloadavg()[0]


def machine() -> str:
    """The computer in one line."""
    return f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Python and the packages whose speed is measured here."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load(path: Path) -> dict[str, Any]:
    """A result file; ConfigError when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("rows"), list):
        raise ConfigError(f"{path} is no result of a benchmark: it has no rows")
    if not all(isinstance(row, dict) for row in value["rows"]):
        raise ConfigError(f"{path} is no result of a benchmark: a row of it holds no named numbers")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result; ConfigError when the place cannot be written."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def main_table(rows: Sequence[Row], *, leave_out: Sequence[str] = ()) -> str:
    """Speed by mode and batch: medians, with the quartiles of tokens/s. Columns that nobody filled are left out."""
    shown = [key for _, key in _COLUMNS if key not in leave_out and any(row.get(key) is not None for row in rows)]
    columns = [(title, key) for title, key in _COLUMNS if key in shown]
    return markdown([title for title, _ in columns], [[_cell(row, key) for _, key in columns] for row in rows])


def _cell(row: Row, key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if key == "same_answers":
        return f"{value}/{row.get('answers')}"
    if key in ("tokens_per_s", "speedup", "vs_transformers"):
        digits = 1 if key == "tokens_per_s" else 2
        shown = [row.get(name) for name in (key, f"{key}_lo", f"{key}_hi")]
        middle, *band = [f"{each:.{digits}f}" for each in shown if is_number(each)] or [str(value)]
        return middle if row.get("runs") == 1 or len(band) < 2 else f"{middle} ({band[0]}..{band[1]})"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def breakdown_table(rows: Sequence[Row]) -> str:
    """Milliseconds of a decode step by part; draft and wait lie inside propose. Empty when nothing was traced."""
    traced = [row for row in rows if "own_ms" in row]
    keys = [key for span in SPANS if any((key := f"{span}_ms") in row for row in traced)]
    if not traced:
        return ""
    names = ["mode", "batch", *keys, "own_ms", "hit_answer_ms"]
    if any("host_ms" in row for row in traced):
        names.remove("own_ms")  # the device's time lies in the host's spans: see `own_ms`
    headers = [name.removesuffix("_ms").replace("_", " ") for name in names]
    return markdown(headers, [[_cell(row, name) for name in names] for row in traced])


def acceptance_table(rows: Sequence[Row]) -> str:
    """How often the draft at each position was accepted; empty when nothing was drafted."""
    drafting = [row for row in rows if "accepted_at_1" in row]
    if not drafting:
        return ""
    deepest = max(int(key.rpartition("_")[2]) for row in drafting for key in row if key.startswith("accepted_at_"))
    names = ["mode", "batch", *(f"accepted_at_{i}" for i in range(1, deepest + 1))]
    headers = ["mode", "batch", *(f"draft {i}" for i in range(1, deepest + 1))]
    return markdown(headers, [[_cell(row, name) for name in names] for row in drafting])


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader must know beside the tables: answers that differ."""
    found = []
    for row in rows:
        if "first_difference_at" in row:
            gap = row.get("gap_nats")
            close = "unknown" if gap is None else f"{gap} nats"
            found.append(
                f"{row['mode']}, batch {row['batch']}: {int(row['answers'] or 0) - int(row['same_answers'] or 0)} of "
                f"{row['answers']} answers differ, first after {row['first_difference_at']} tokens; widest gap {close}"
            )
    return found


def tables(outcome: Mapping[str, Any]) -> str:
    """Everything worth reading in a result, as Markdown."""
    rows: list[Row] = outcome["rows"]
    told = ("model", "dtype", "device", "threads", "prompts", "output_len", "temperature")
    head = ", ".join(f"{name} {outcome[name]}" for name in told if outcome.get(name) is not None)
    known = [head, str(outcome.get("machine", "machine unknown"))]
    if "load_before" in outcome and "load_after" in outcome:
        known.append(f"load average {outcome['load_before']} before, {outcome['load_after']} after")
    parts = ["; ".join(filter(None, known))]
    if "notice" in outcome:
        parts.append(str(outcome["notice"]))
    if rows and "clients" in rows[0]:
        parts.append(online_table(rows))
    elif rows and ("rounds" in rows[0] or not any("mode" in row for row in rows)):
        keys = list(dict.fromkeys(key for row in rows for key in row))
        parts.append(markdown(keys, [[_cell(row, key) for key in keys] for row in rows]))
    else:
        queued = ("ttft_ms",) if outcome.get("continuous") else ()  # prompts that wait for their turn, not for us
        parts += [main_table(rows, leave_out=queued), breakdown_table(rows), acceptance_table(rows)]
    parts += [f"- {remark}" for remark in [*remarks(rows), *outcome.get("failures", ())]]
    if outcome.get("continuous"):
        parts += [_reference_line(outcome, row) for row in rows]
    return "\n\n".join(part for part in parts if part)


def online_table(rows: Sequence[Row]) -> str:
    """What clients of a server saw."""
    titles = {
        "clients": "clients", "requests": "requests", "failed": "failed", "empty": "empty", "tokens_per_s": "tokens/s",
        "ttft_ms_p50": "first token ms p50", "ttft_ms_p99": "p99", "ttft_ms_max": "max", "itl_ms_p50": "gap ms p50",
        "itl_ms_p99": "gap p99", "slowest_to_median": "slowest / median", "peak_rss_mb": "peak RSS MB",
        "start_to_ready_s": "ready s", "start_to_first_token_s": "start to first token s",
    }  # fmt: skip
    keys = [key for key in titles if any(row.get(key) is not None for row in rows)]
    cells = [[f"{row[key]:g}" if is_number(row.get(key)) else str(row.get(key) or "") for key in keys] for row in rows]
    return markdown([titles[key] for key in keys], cells)


def _reference_line(outcome: Mapping[str, Any], row: Row) -> str:
    """The line the reference's bench.py ends with."""
    tokens, rate = int(row["tokens"] or 0), float(row["end_to_end_tokens_per_s"] or 0)
    seconds = tokens / int(row["runs"] or 1) / rate if rate else 0.0
    model = row.get("model") or outcome["model"]
    return (
        f"Model: {model}, Mode: {row['mode']}, Total: {tokens}tok, Time: {seconds:.2f}s, "
        f"Total Throughput: {rate:.2f}tok/s"
    )


def write_text(path: Path, text: str) -> None:
    """Write tables; ConfigError when the place cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    parser = argparse.ArgumentParser(
        prog="bench.report", description="Tables and pictures of results that lie there.", allow_abbrev=False
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all of them as one result")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables, to a file as well")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="PNG pictures; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        outcome = join([load(path) for path in args.results], [path.stem for path in args.results])
        pairs = any("pair" in row for row in outcome["rows"])
        text = pair_report.tables(outcome) if pairs else tables(outcome)
        print(text)
        if args.json:
            write_json(args.json, outcome)
        if args.markdown:
            write_text(args.markdown, text)
        if args.plots:
            from bench.plots import draw_all

            for picture in draw_all(outcome, args.plots):
                print(f"drew {picture}", file=sys.stderr)
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
