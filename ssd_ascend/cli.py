"""`ssd-ascend X ...` is `python -m ssd_ascend.X ...`. Imports nothing before it knows which door was asked for."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ssd_ascend.errors import unknown_name

DOORS = {
    "serve": "OpenAI-compatible server",
    "generate": "answers to one prompt or a file of prompts",
    "chat": "talk to a model in the terminal",
    "doctor": "what this machine has, what is missing, what to install",
    "parity": "record a golden run on one device, check it on another",
    "plan": "who runs where on a cluster, and how fast it will be",
    "train": "train an EAGLE-3 head for a target",
    "speculate": "run a speculator as a service of its own",
}


def available() -> dict[str, str]:
    """The doors this installation has, with one line each; looked up as files, because importing them is slow."""
    here = Path(__file__).parent
    return {
        door: line
        for door, line in DOORS.items()
        if (here / f"{door}.py").is_file() or (here / door / "__main__.py").is_file()
    }


def usage() -> str:
    """The text of `--help`."""
    doors = "\n".join(f"  {door:<10} {line}" for door, line in available().items())
    return f"usage: ssd-ascend COMMAND [flags]\n\n{doors}\n\n`ssd-ascend COMMAND --help` lists the flags of a command."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one door with the remaining arguments; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        try:
            print(usage(), flush=True)
        except BrokenPipeError:  # the reader has seen enough, as `head` does; at its end Python would write once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if arguments else 2
    door, *rest = arguments
    if door not in available():
        missing = door in DOORS
        problem = (
            f"{door!r} is not part of this installation" if missing else unknown_name("command", door, available())
        )
        print(f"ssd-ascend: {problem}", file=sys.stderr)
        return 2
    sys.argv = [f"ssd-ascend {door}", *rest]
    try:
        runpy.run_module(f"ssd_ascend.{door}", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return int(stop.code or 0)
    return 0
