"""`python -m ssd_ascend.parity record --device X --out DIR` and `check DIR --device Y`: does Y answer what X answered?

Exit status 0 when nothing is different, 1 when something is, 2 when there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ssd_ascend import env
from ssd_ascend.config.engine import DTYPES
from ssd_ascend.errors import ConfigError, needs_packages

if TYPE_CHECKING:
    from ssd_ascend.parity.comparing import Row
    from ssd_ascend.parity.golden import Golden


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="ssd-ascend parity", description="Golden runs that travel between machines.", allow_abbrev=False
    )
    verbs = top.add_subparsers(dest="verb", required=True)
    record = verbs.add_parser("record", help="run on one device and keep what came out", allow_abbrev=False)
    record.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the golden run goes")
    record.add_argument("--model", metavar="M", help="also a real model instead of the built-in small ones")
    record.add_argument("--draft", metavar="D", help="its draft")
    record.add_argument("--drafter", default="model", choices=("model", "eagle3"), help="what the draft is")
    record.add_argument("--dtype", default="auto", choices=DTYPES, help="serving dtype (default bfloat16)")
    check = verbs.add_parser("check", help="run on another device and compare", allow_abbrev=False)
    check.add_argument("golden", type=Path, metavar="DIR", help="a golden run")
    check.add_argument("--dtype", default=None, choices=DTYPES, help="serving dtype (default: the golden run's)")
    check.add_argument("--json", action="store_true", help="the table as one JSON object on standard output")
    for verb in (record, check):
        verb.add_argument("--device", default=None, help="cpu, or any accelerator there is (default: SSD_DEVICE)")
    return top


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def run_record(args: argparse.Namespace) -> int:
    """`record`."""
    from ssd_ascend.parity.golden import save_golden
    from ssd_ascend.parity.recording import Options, record

    if args.draft is not None and args.model is None:
        raise ConfigError("--draft is given without a model", remedy="add --model")
    options = Options(device=args.device, dtype=args.dtype, model=args.model, draft=args.draft, drafter=args.drafter)
    began = time.monotonic()
    golden = record(options, _tell)
    size = save_golden(golden, args.out)
    about = f"{golden.about['device']}, {golden.dtype}"
    print(f"recorded {args.out} on {about}: {size / 1e6:.2f} MB in {time.monotonic() - began:.0f} s")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """`check`."""
    from ssd_ascend.parity.comparing import compare, passed
    from ssd_ascend.parity.golden import load_golden
    from ssd_ascend.parity.recording import Options, record

    golden = load_golden(args.golden)
    model = golden.model
    options = Options(
        device=args.device,
        dtype=args.dtype or golden.dtype,
        model=model.source,
        draft=model.draft,
        drafter=model.drafter or "model",
        prompts=golden.prompts,
    )
    fresh = record(options, _tell)
    rows = compare(golden, fresh)
    print(_as_json(golden, fresh, rows) if args.json else _as_table(golden, fresh, rows))
    return 0 if passed(rows) else 1


def _as_json(golden: Golden, fresh: Golden, rows: Sequence[Row]) -> str:
    lines = [{**row._asdict(), "verdict": str(row.verdict)} for row in rows]
    return json.dumps({"golden": golden.about, "checked": fresh.about, "rows": lines}, indent=1)


def _as_table(golden: Golden, fresh: Golden, rows: Sequence[Row]) -> str:
    """Aligned text, plain, so that it can be pasted into a mail."""
    cells = [("check", "error", "allowed", "verdict", "")]
    for row in rows:
        error, allowed = ("" if value is None else f"{value:.2g}" for value in (row.error, row.tolerance))
        cells.append((row.check, error, allowed, str(row.verdict), row.detail))
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    counts = Counter(str(row.verdict) for row in rows)
    verdict = "; ".join(f"{count} {name}" for name, count in counts.items())
    heads = [f"golden   {golden.about['device']}, {golden.dtype}, {golden.about['date']}"]
    heads.append(f"checked  {fresh.about['device']}, {fresh.dtype}, {fresh.about['date']}")
    return "\n".join([*heads, "", *lines, "", verdict])


def main(argv: Sequence[str] | None = None) -> int:
    """One verb."""
    args = parser().parse_args(argv)
    env.let_threads_sleep()
    try:
        with needs_packages():
            return run_record(args) if args.verb == "record" else run_check(args)
    except ConfigError as error:
        print(f"ssd-ascend parity: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
