"""The door `python -m ssd_ascend.speculate`: drafts for the targets that connect, wherever they run.

Takes the engine's flags: `--model` names the target that is drafted for (of which only the config is read, and for an
EAGLE-3 head the embedding), `--draft` what drafts, `--device` where. `--speculator` is ssd, whatever a preset says.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ssd_ascend import env
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.errors import ConfigError, SsdError, flag_names, needs_packages
from ssd_ascend.flags import add_engine_arguments, engine_config


def build_parser() -> argparse.ArgumentParser:
    """The flags of this door."""
    parser = argparse.ArgumentParser(prog="python -m ssd_ascend.speculate", description=__doc__, allow_abbrev=False)
    line = parser.add_argument_group("line")
    line.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    line.add_argument("--port", type=int, default=7070, help="port to listen on; 0 takes a free one (default: 7070)")
    line.add_argument("--preset", dest="model", default=argparse.SUPPRESS, metavar="NAME", help="the same as --model")
    add_engine_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Load the drafter and serve until told to stop."""
    args.speculator = getattr(args, "speculator", "ssd")
    config = engine_config(args)
    _check(args, config.speculation)
    from ssd_ascend.engine.speculator import open_service  # not at the top: torch, and --help should be instant

    service, where = open_service(config, args.host, args.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: service.stop())
    print(f"ready: drafting for {config.model} on {where}", flush=True)
    service.serve()


def _check(args: argparse.Namespace, config: SpeculationConfig) -> None:
    """Refuse, with ConfigError, what a speculator of its own cannot be, before anything is loaded."""
    if config.speculator != "ssd":
        raise ConfigError(
            f"a speculator of its own serves ssd, not {config.speculator!r}", remedy="leave --speculator out"
        )
    elsewhere = {*config.own_worker, *(["speculators"] if config.speculators else [])} & vars(args).keys()
    if elsewhere:
        raise ConfigError(
            f"{flag_names(elsewhere)} given, but this is the process that drafts, on its --device",
            remedy="leave it out",
        )
    if not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port is {args.port}", remedy=f"give 1 to {(1 << 16) - 1}, or 0 for any that is free")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    env.let_threads_sleep()
    args = build_parser().parse_args(argv)
    try:
        with needs_packages():
            run(args)
    except SsdError as error:
        print(f"ssd_ascend.speculate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
