"""The door `python -m ssd_ascend.generate`: prompts from the command line or a file, answers on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_ascend import env
from ssd_ascend.errors import ConfigError, RequestError, SsdError, needs_packages
from ssd_ascend.flags import add_engine_arguments, engine_config
from ssd_ascend.progress import bar

if TYPE_CHECKING:
    from ssd_ascend.engine.answers import Answer


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ssd-ascend generate", description="Generate text offline.", allow_abbrev=False
    )
    add_engine_arguments(parser)
    group = parser.add_argument_group("request")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt, may be repeated")
    source.add_argument(
        "--prompts", metavar="FILE", help='a .jsonl file: {"prompt": TEXT} or {"messages": [...]} a line'
    )
    group.add_argument("--chat", action="store_true", help="send each prompt as a user message of a chat")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens per answer (default 128)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--seed", type=int, metavar="S", help="makes sampled answers repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    group.add_argument("--json", action="store_true", help="one JSON object a prompt, on standard output")
    return parser


def read_prompts(args: argparse.Namespace) -> list[str | list[dict[str, Any]]]:
    """Prompts (texts) and conversations (message lists) that were asked for. ConfigError names file and line."""
    if args.prompt is not None:
        return [_as_asked(text, chat=args.chat) for text in args.prompt]
    path = Path(args.prompts)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    items = [_item(line, f"{path}, line {i}", chat=args.chat) for i, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"{path} holds no prompts")
    return items


def _item(line: str, where: str, *, chat: bool) -> str | list[dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return list(value["messages"])
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ConfigError(f"{where} has neither a prompt (text) nor messages (a list)")
    return _as_asked(text, chat=chat)


def _as_asked(text: str, *, chat: bool) -> str | list[dict[str, Any]]:
    return [{"role": "user", "content": text}] if chat else text


def run(args: argparse.Namespace) -> int:
    """Load, generate, print. Returns the exit status."""
    from ssd_ascend.core.sampling import SamplingParams
    from ssd_ascend.engine.rank import follow  # not at the top: torch, and --help should be instant
    from ssd_ascend.llm import LLM

    items = read_prompts(args)
    sampling = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        max_tokens=args.max_tokens,
    )
    config = engine_config(args)
    if follow(config):
        return 0
    with bar("loading") as loaded:
        llm = LLM(config, progress=loaded)
    total, done = len(items) * args.max_tokens, 0
    with llm, bar("generating", unit="of the tokens") as advance:

        def watch(tokens: int) -> None:
            nonlocal done
            done += tokens
            advance(done, total)

        outputs = llm.run(items, sampling, watch=watch)
        answers = [(output.answers[0], llm.stats_of(output.answers[0])) for output in outputs]
    for answer, stats in answers:
        _print(answer, stats, as_json=args.json)
    return 0


def _print(answer: Answer, stats: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        fields = {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stats": stats,
        }
        print(json.dumps(fields, ensure_ascii=False), flush=True)
    else:
        print(answer.text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    env.let_threads_sleep()
    args = parser().parse_args(argv)
    try:
        with needs_packages():
            return run(args)
    except RequestError as error:
        print(f"error: {error.param or 'request'}: {error}", file=sys.stderr)
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
