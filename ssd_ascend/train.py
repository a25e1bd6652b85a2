"""The door `python -m ssd_ascend.train`: make an EAGLE-3 head for a target, or judge one.

python -m ssd_ascend.train --target M --out DIR [--data FILE.jsonl | --synthesize N]     make
python -m ssd_ascend.train --evaluate --target M --head DIR --prompts FILE.jsonl         judge
python -m ssd_ascend.train --plot DIR                                                    draw a run once more
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ssd_ascend import catalogue, env
from ssd_ascend.config.training import Run, SynthesisConfig, TrainingConfig
from ssd_ascend.errors import ConfigError, SsdError, needs_packages
from ssd_ascend.progress import bar

_TRAINING = {field.name for field in fields(TrainingConfig)}
_SYNTHESIS = {field.name for field in fields(SynthesisConfig)}


def parser() -> argparse.ArgumentParser:
    """The command line. Flags that were not given stay absent: defaults have one home, the config."""
    parser = argparse.ArgumentParser(
        prog="ssd-ascend train",
        description="Train an EAGLE-3 head for a target, or judge one.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--target", metavar="M", help="a directory, a .gguf file, a preset of models/, or a hub name")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the head goes; the same command goes on with it")
    parser.add_argument("--device", help="cpu, or what accelerator there is (default: SSD_DEVICE, else the best)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of target and arithmetic")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="compile functions (default: on a GPU)"
    )
    _add_text(parser.add_argument_group("text: one of --data and --synthesize"))
    _add_training(parser.add_argument_group("training"))
    _add_judging(parser.add_argument_group("judging a head"))
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="draw the picture of the run in DIR once more, and stop"
    )
    return parser


def _add_text(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", metavar="FILE", help='JSONL of {"messages": [{"role": ..., "content": ...}, ...]}')
    group.add_argument("--synthesize", type=int, metavar="N", help="have the target write N conversations")
    group.add_argument("--openings", metavar="FILE", help="what their user turns begin with (default: our own list)")
    group.add_argument("--max-length", type=int, metavar="L", help="tokens of a conversation (default 512)")
    group.add_argument("--slots", type=int, metavar="S", help="conversations written side by side")
    group.add_argument("--fork-rate", type=float, metavar="P", help="share of answer tokens replaced by a likely other")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=int, metavar="N")
    group.add_argument("--batch-tokens", type=int, metavar="N", help="tokens of a step")
    group.add_argument("--ttt", dest="unroll", type=int, metavar="T", help="steps of training-time test (default 7)")
    group.add_argument("--draft-vocab", type=int, metavar="V", help="tokens that the head can write (default 32000)")
    group.add_argument("--lr", type=float, help="of AdamW: norms and vocabulary head")
    group.add_argument("--muon-lr", type=float, help="of Muon: the layer's matrices")
    group.add_argument("--step-decay", type=float, metavar="D", help="each step weighs D times the one before")
    group.add_argument("--fork-weight", type=float, metavar="W", help="how much more steps after a fork weigh")
    group.add_argument("--lk", dest="overlap_weight", type=float, metavar="W", help="share of the LK loss, 0 to 1")
    group.add_argument("--start", choices=("target", "random"), help="where the first weights come from")
    group.add_argument("--seed", type=int)
    group.add_argument("--held-out", type=float, metavar="P", help="share of the text that judges the run")
    group.add_argument("--evaluate-every", type=int, metavar="N", help="steps between two looks at held-out text")
    group.add_argument("--save-every", type=int, metavar="N", help="steps between two checkpoints")


def _add_judging(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--evaluate", action="store_true", help="judge --head on --prompts instead of training")
    group.add_argument("--head", type=Path, metavar="DIR", help="the head; a directory, or a preset with one")
    group.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL of {"text": ...} or {"messages": [...]}')
    group.add_argument("--lookaheads", metavar="LIST", help="of chains (default 3,5,7)")
    group.add_argument("--branch-lookahead", type=int, metavar="K", help="of chains and branches compared (default 5)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default 512)")
    group.add_argument("--temperature", type=float, metavar="T", help="of the sampled answers (default 1)")
    group.add_argument("--seeds", type=int, metavar="N", help="sampled answers to each prompt (default 3)")
    group.add_argument("--json", type=Path, metavar="FILE", help="also write the verdict to a file")


def run(given: dict[str, Any]) -> int:
    """Make, judge or draw. Returns the exit status."""
    if "plot" in given:
        return _plot(given["plot"])
    if "target" not in given:
        raise ConfigError("no target is named", remedy="give --target")
    return _evaluate(given) if "evaluate" in given else _train(given)


def _train(given: dict[str, Any]) -> int:
    if "out" not in given:
        raise ConfigError("no place for the head is named", remedy="give --out DIR")
    if ("data" in given) == ("synthesize" in given):
        raise ConfigError("text is needed, from one place", remedy="give --data FILE or --synthesize N")
    synthesis = None
    if "synthesize" in given:
        asked = {name: value for name, value in given.items() if name in _SYNTHESIS}
        synthesis = SynthesisConfig(conversations=given["synthesize"], **asked)
    plan = Run(
        target=given["target"],
        data=given.get("data"),
        openings=given.get("openings"),
        digest=_digest(given.get("data") or given.get("openings")),
        synthesis=synthesis,
        training=TrainingConfig(**{name: value for name, value in given.items() if name in _TRAINING}),
    )
    from ssd_ascend.training import pipeline, plots  # not at the top: they bring torch, and --help should be instant

    path, command = catalogue.resolve_model(plan.target), " ".join(("python -m ssd_ascend.train", *sys.argv[1:]))
    result = pipeline.make_head(plan, path, given["out"], _means(given), command=command)
    try:
        plots.draw(result, given["out"] / plots.PICTURE)
    except ConfigError as error:
        print(f"no picture: {error}", file=sys.stderr)
    print(json.dumps({"out": str(given["out"]), **result["log"][-1]}))
    return 0


def _digest(file: str | None) -> str | None:
    """Of a file's content; None where there is none (whoever reads it will say so)."""
    path = Path(file) if file else None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None and path.is_file() else None


def _evaluate(given: dict[str, Any]) -> int:
    for name in ("head", "prompts"):
        if name not in given:
            raise ConfigError(f"--evaluate needs --{name}")
    from ssd_ascend.text import Tokenizer
    from ssd_ascend.training import verdict

    path, head = catalogue.resolve_model(given["target"]), catalogue.resolve_draft(str(given["head"]))
    tokenizer = Tokenizer.load(path)
    prompts = verdict.read_prompts(given["prompts"], tokenizer)
    names = {"branch_lookahead", "max_tokens", "temperature"}
    asked: dict[str, Any] = {name: value for name, value in given.items() if name in names}
    if "lookaheads" in given:
        asked["lookaheads"] = _numbers(given["lookaheads"])
    if "seeds" in given:
        asked["seeds"] = tuple(range(given["seeds"]))
    questions = verdict.Questions(**asked)
    result = verdict.evaluate(head, path, prompts, tokenizer, _means(given), questions)
    if "json" in given:
        given["json"].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(verdict.table(result))
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--lookaheads is {text!r}", remedy="give numbers, such as 3,5,7") from None


def _means(given: dict[str, Any]) -> Any:
    from ssd_ascend.backends.registry import load_backend
    from ssd_ascend.training.pipeline import Means

    return Means(load_backend(given.get("device")), given.get("dtype", "auto"), given.get("compile"), bar)


def _plot(folder: Path) -> int:
    from ssd_ascend.training import pipeline, plots

    file = folder / pipeline.LOG
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", remedy="give the directory of a finished run") from error
    plots.draw(result, folder / plots.PICTURE)
    print(folder / plots.PICTURE)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    env.let_threads_sleep()
    try:
        with needs_packages():
            return run(vars(parser().parse_args(argv)))
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
