"""The command line of `bench.py`: what to run, on what, and where the numbers go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import reference_line
from bench.cases import KINDS
from ssd_ascend.errors import RequestError, SsdError
from ssd_ascend.flags import add_engine_arguments

_EXAMPLES = """examples:
  python bench/bench.py --model smollm2-135m --dtype bfloat16 --batch 1,8 --against transformers --json out.json
  python bench/bench.py --model smollm2-135m --modes none,sd:ngram --kinds copy --output-len 128
  python -O bench/bench.py --llama --size 70 --gpus 5 --spec --async --k 7 --f 3 --b 1 --temp 0 --all
  python bench/bench.py --openai-url http://127.0.0.1:8000 --clients 1,8
  python bench/bench.py --model smollm2-135m --clients 32"""


def build_parser() -> argparse.ArgumentParser:
    """All flags: the engine's, ours, and the reference's."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description="Measure an engine: speed by mode and batch size, drafting, and where a step's time goes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the reference has flags of one letter
        conflict_handler="resolve",  # --speculator takes a list here
    )
    add_engine_arguments(parser)
    group = parser.add_argument_group("benchmark")

    def flag(*names: str, **options: Any) -> None:
        group.add_argument(*names, default=argparse.SUPPRESS, **options)

    flag("--modes", "--speculator", dest="modes", metavar="LIST",
         help="SPECULATOR[:DRAFTER[:K]], comma-separated, measured in turns in one run (default none)")  # fmt: skip
    flag("--batch", metavar="LIST", help="batch sizes, comma-separated (default 1)")
    flag("--output-len", dest="output_len", type=int, metavar="N", help="tokens per answer (default 128)")
    flag(
        "--prompts", type=int, metavar="N", help="prompts of each kind (default 2; by data set for --all and the like)"
    )
    flag("--kinds", metavar="LIST", help=f"kinds of built-in prompts (default all: {','.join(KINDS)})")
    flag("--prompt-file", metavar="FILE", help='your own prompts: JSONL with a "text" a line')
    flag("--input-len", dest="input_len", type=int, metavar="N", help="tokens of a --random prompt (default 128)")
    flag("--chat", action="store_true", help="send each prompt as a user's message, in the model's chat template")
    flag("--repeat", type=int, metavar="R", help="times to go through the prompts (default 3)")
    flag("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    flag("--respect-eos", action="store_true", help="end answers where the model does (default: at --output-len)")
    flag("--keep-prefix-cache", action="store_true", help="let later runs find the prompts of earlier ones cached")
    flag("--against", choices=("transformers",), help="measure this, too, in the same turns")
    flag("--tune", metavar="LIST", help="lookaheads to try for each drafting mode first, keeping the fastest")
    flag("--synthetic", action="store_true", help="random weights at the preset's shapes: where there are no others")
    flag("--accepted", type=float, metavar="P", help="share of drafts kept with --synthetic (default: the preset's)")
    flag("--foreseen", type=float, metavar="P", help="share of other outcomes foreseen with --synthetic (default 0.85)")
    flag("--openai-url", metavar="URL", help="measure this server instead of an engine in this process")
    flag("--api-key", metavar="KEY", help="key of that server")
    flag("--clients", metavar="LIST", help="concurrent streaming clients; starts our own server unless --openai-url")
    flag("--soak", type=int, metavar="N", help="N rounds with an eye on memory; without --model, of a tiny model")
    flag("--json", metavar="FILE", help="where the result goes")
    flag("--markdown", metavar="FILE", help="the tables, to a file as well")
    flag("--plots", metavar="DIR", help="PNG pictures; needs matplotlib")
    reference_line.add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns the exit status."""
    from bench import report

    count, kind = _devices(args)
    notices = reference_line.translate(args, num_devices=count, device=kind)
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)
    outcome = _measure(args)
    tables = report.tables(outcome)
    print(tables)
    if path := getattr(args, "json", None):
        report.write_json(Path(path), outcome)
    if path := getattr(args, "markdown", None):
        report.write_text(Path(path), tables)
    if path := getattr(args, "plots", None):
        from bench.plots import draw_all

        for picture in draw_all(outcome, Path(path)):
            print(f"drew {picture}", file=sys.stderr)
    return 1 if outcome.get("failures") else 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Whichever benchmark the flags ask for; each brings its own packages."""
    if hasattr(args, "soak"):
        from bench.soak import measure
    elif hasattr(args, "openai_url") or hasattr(args, "clients"):
        from bench.online import measure
    else:
        from bench.offline import measure
    if not hasattr(args, "synthetic"):
        return measure(args)
    from bench.stand_ins import stand_ins

    with stand_ins(args) as notice:
        return measure(args) | {"notice": notice}


def _devices(args: argparse.Namespace) -> tuple[int | None, str | None]:
    """How many accelerators there are and of which kind; None on a CPU. Asked only when a line counts them."""
    if not hasattr(args, "gpus"):
        return None, None
    import torch

    from ssd_ascend.backends.registry import load_backend

    backend = load_backend(getattr(args, "device", None))
    if backend.device_type == "cpu":
        return None, None
    return torch.accelerator.device_count(), backend.name


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except RequestError as error:
        print(f"error: {error.param or 'request'}: {error}", file=sys.stderr)
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 2
