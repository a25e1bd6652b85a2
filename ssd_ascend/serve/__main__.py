"""`python -m ssd_ascend.serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from ssd_ascend import env
from ssd_ascend.errors import ConfigError, SsdError
from ssd_ascend.flags import add_engine_arguments, engine_config


def build_parser() -> argparse.ArgumentParser:
    """The flags of this door."""
    parser = argparse.ArgumentParser(prog="python -m ssd_ascend.serve", description=__doc__)
    http = parser.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    http.add_argument("--api-key", metavar="KEY", help="key clients must send (default: SSD_API_KEY, else none)")
    http.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="seconds requests may go on after SIGTERM"
    )
    http.add_argument(
        "--tool-format",
        choices=("auto", "hermes", "llama3"),
        default="auto",
        help="how the model writes tool calls (default: as its chat template says)",
    )
    add_engine_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None, *, engine_command: Sequence[str] | None = None) -> int:
    """Serve; returns the exit status. `engine_command` replaces the engine process, for tests."""
    env.let_threads_sleep()
    args = build_parser().parse_args(argv)
    try:
        config = engine_config(args)
        if config.tensor_parallel > 1:
            from ssd_ascend.engine.rank import follow  # torch: only who may be one of several ranks needs it here

            if follow(config):
                return 0
        try:
            from ssd_ascend.engine.async_engine import ENGINE_COMMAND
            from ssd_ascend.serve.server import ServerConfig, run_server
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the server needs the package {error.name!r}", remedy="pip install 'ssd-ascend[serve]'"
            ) from error
        serving = ServerConfig(
            host=args.host,
            port=args.port,
            api_key=args.api_key or env.api_key(),
            drain_s=args.drain_timeout,
            tool_format=args.tool_format,
        )
        command = engine_command or ENGINE_COMMAND
        asyncio.run(run_server(config, serving, announce=_announce, engine_command=command))
    except SsdError as error:
        print(f"ssd_ascend.serve: {error}", file=sys.stderr)
        return 1
    return 0


def _announce(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
