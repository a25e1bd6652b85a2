"""Speculation with the drafter on a device of its own: plain, SD and SSD for three pairs, TP=2, and the lines between.

`python -m bench.two_gpus --json OUT.json` on a machine with two GPUs takes under eight minutes; the most valuable rows
come first, and every row is in the file as soon as it is known. Weights are synthetic, at true shapes; how often drafts
are kept and outcomes foreseen is set (`--accepted`, `--foreseen`), not learned. Rehearse with `--device cpu --tiny`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, where `bench` would mean bench.py

from bench import report
from bench.checkpoints import hooked
from bench.links import round_trips
from bench.pair_report import compared, tables
from bench.pairs import OUT_OF_TIME, Job, Settings, append, find_pair, skip, to_json
from bench.shapes import shape
from bench.sums import sums
from ssd_ascend.backends.base import MeetingBackend, SharingBackend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.errors import SsdError
from ssd_ascend.transport.link import LINK_KINDS

_PAIRS, _TINY = ("8b-1b", "8b-eagle3", "32b-0.6b"), ("tiny", "tiny-eagle3")


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.two_gpus", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="where the result goes")
    parser.add_argument("--device", default="cuda", help="kind of the target's device (default cuda)")
    parser.add_argument("--worker-device", metavar="DEV", help="the drafter's, such as cuda:0 (default: the second)")
    parser.add_argument("--pairs", type=_names, help=f"of {','.join(_PAIRS + _TINY)} (default: the first three)")
    parser.add_argument("--modes", type=_names, default=("none", "ssd", "sd"), help="of none,ssd,sd (default all)")
    parser.add_argument("--batches", type=_numbers, default=(1, 4, 16), help="sequences at once (default 1,4,16)")
    parser.add_argument("--sd-lookaheads", type=_numbers, default=(), help="more K to try for sd (default: none)")
    parser.add_argument("--tp", type=int, default=2, help="cards of the tensor-parallel rows; 1 for none (default 2)")
    parser.add_argument("--accepted", type=float, default=0.8, help="share of drafts that are kept (default 0.8)")
    parser.add_argument("--foreseen", type=float, default=0.85, help="share of other outcomes that are the draft's "
                        "second choice (default 0.85)")  # fmt: skip
    parser.add_argument("--fan-out", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=450, help="start nothing after this long (default 450)")
    parser.add_argument(
        "--links", type=_names, default=(*LINK_KINDS, "device"), help="lines to time (default: all there are)"
    )
    parser.add_argument("--speculation", type=_setting, action="append", default=[], metavar="KEY=VALUE",
                        help="of SpeculationConfig, such as on_miss=decline; may be repeated")  # fmt: skip
    parser.add_argument(
        "--send-features",
        action="store_true",
        help="also measure features that are sent where they could stay in place",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a rehearsal")
    parser.add_argument("--folder", type=Path, help="where checkpoints are laid out (default: a temporary one)")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _names(text))


def _pairs(args: argparse.Namespace) -> tuple[str, ...]:
    return args.pairs or (_TINY if args.tiny else _PAIRS)


def schedule(args: argparse.Namespace, *, device_lines: bool = False, shared_features: bool = False) -> list[list[Job]]:
    """The jobs of each process, the most valuable first. A target's plain decoding is measured once.

    device_lines: whether messages can also go over the devices themselves; shared_features: whether features can.
    """
    pairs = _pairs(args)
    groups: list[list[Job]] = []
    decoded: set[str] = set()
    for name in pairs:
        target = find_pair(name).target
        modes = [mode for mode in args.modes if mode != "none" or target not in decoded]
        decoded.add(target)
        jobs = [Job(pair=name, speculator=mode) for mode in modes]
        jobs += [Job(pair=name, speculator=mode, lookahead=k) for mode in modes if mode != "none"
                 for k in find_pair(name).shorter]  # fmt: skip
        if "ssd" in modes and device_lines:
            jobs.append(Job(pair=name, speculator="ssd", line="device"))
        elif "ssd" in modes and shared_features and find_pair(name).draft is None and args.send_features:
            jobs.append(Job(pair=name, speculator="ssd", line="socket"))
        if "sd" in args.modes:
            jobs += [Job(pair=name, speculator="sd", lookahead=k) for k in args.sd_lookaheads]
        groups.append(jobs)
    if args.tp > 1:
        by_size = [name for name in reversed(pairs) if find_pair(name).draft is not None]
        for mode in [mode for mode in args.modes if mode != "ssd"]:
            groups += [[Job(pair=name, speculator=mode, tp=args.tp)] for name in by_size]
    return groups


def settings_of(args: argparse.Namespace, folder: Path) -> Settings:
    """What holds for all jobs. ConfigError when the devices are not there."""
    backend = load_backend(args.device)
    backend.device(0)
    worker = args.worker_device or (backend.name if backend.device_type == "cpu" else f"{backend.name}:1")
    kind, _, index = worker.partition(":")
    load_backend(kind).device(int(index or 0))
    return Settings(
        folder=str(folder),
        device=backend.name,
        worker_device=worker,
        batches=args.batches,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        accepted=args.accepted,
        foreseen=args.foreseen,
        fan_out=args.fan_out,
        speculation=dict(args.speculation),
    )


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; the result is written anew with every row."""
    began, load = time.time(), report.load_average()
    deadline = began + args.seconds
    settings, rows = settings_of(args, folder), folder / "rows.jsonl"
    rows.write_text("")  # a folder that is used again keeps its checkpoints, not the rows of another run
    environment = hooked(folder / "hook")

    def write() -> dict[str, Any]:
        whole = rows.read_text().rpartition("\n")[0]  # the last line may be on its way
        lines = [json.loads(line) for line in whole.splitlines()]
        timelines = {line["timeline"]: line["bars"] for line in lines if "bars" in line}
        found = compared([line for line in lines if "bars" not in line])
        device = next((str(row["device"]) for row in found if "device" in row), settings.device)
        outcome = report.result(
            found, device=device, load=(load, report.load_average()), accepted=args.accepted, foreseen=args.foreseen,
            notice="synthetic weights: acceptance and hit rate are set, not learned", prompt_len=args.prompt_len,
            output_len=args.output_len, seconds=round(time.time() - began, 1), timelines=timelines,
        )  # fmt: skip
        report.write_json(args.json, outcome)
        return outcome

    backend, apart = load_backend(args.device), settings.worker_device != f"{args.device}:0"
    planned = schedule(
        args, device_lines=apart and isinstance(backend, MeetingBackend),
        shared_features=apart and isinstance(backend, SharingBackend),
    )  # fmt: skip
    over_cards = next((number for number, jobs in enumerate(planned) if any(job.tp > 1 for job in jobs)), len(planned))
    for number, jobs in enumerate(planned):
        if number == over_cards:
            _lines(args, rows, deadline)
        plan = folder / f"jobs-{number}.json"
        plan.write_text(to_json(jobs, settings, rows, deadline))
        _run(plan, jobs, environment, rows, deadline, write)
    if over_cards == len(planned):
        _lines(args, rows, deadline)
    return write()


def _lines(args: argparse.Namespace, rows: Path, deadline: float) -> None:
    """Sums over cards, and messages between them."""
    if args.tp > 1 and time.time() < deadline:
        for row in sums(args.device):
            append(rows, row)
    if args.links and time.time() < deadline:
        hidden = shape(find_pair(_pairs(args)[0]).target)["hidden_size"]
        device = load_backend(args.device).device(0)
        for row in round_trips(args.links, device, feature_width=3 * hidden, batches=args.batches):
            append(rows, row)


def _run(plan: Path, jobs: Sequence[Job], environment: dict[str, str], rows: Path, deadline: float, write: Any) -> None:
    """One process; ended when it outlives the deadline, which leaves its rows so far."""
    if time.time() > deadline:
        for job in jobs:
            skip(rows, job, OUT_OF_TIME)
        return
    child = subprocess.Popen([sys.executable, "-m", "bench.pairs", str(plan)], env=environment, stdout=sys.stderr)
    size = -1
    try:
        while child.poll() is None and time.time() < deadline + 20:
            if (now := rows.stat().st_size) != size:
                size = now
                write()
            time.sleep(0.2)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
    if child.returncode:
        names = ", ".join(job.name for job in jobs)
        append(rows, {"pair": jobs[0].pair, "mode": names, "tp": jobs[0].tp,
                      "skipped": f"its process ended with status {child.returncode}"})  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    args = build_parser().parse_args(argv)
    try:
        if args.folder is not None:
            args.folder.mkdir(parents=True, exist_ok=True)
            outcome = measure(args, args.folder)
        else:
            with tempfile.TemporaryDirectory() as folder:
                outcome = measure(args, Path(folder))
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(tables(outcome))
    wrong = [row for row in outcome["rows"] if row.get("same_answers") != row.get("answers")]
    return 1 if wrong or not any("tokens_per_s" in row for row in outcome["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
