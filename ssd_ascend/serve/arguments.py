"""The command line of the server: its flags, `--config FILE`, and the `ServerConfig` they make. `__main__` calls it."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ssd_ascend import env
from ssd_ascend.errors import ConfigError
from ssd_ascend.serve.config import ServerConfig

_ADMIN_HOST = "127.0.0.1"
AddFlags = Callable[[argparse.ArgumentParser], object]


def build_parser(*others: AddFlags) -> argparse.ArgumentParser:
    """The flags of this door: the server's own, and what `others` add (those of the engine, of the launcher)."""
    parser = argparse.ArgumentParser(prog="python -m ssd_ascend.serve", description="The OpenAI-compatible server.")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of flags without their dashes; flags beat it")
    _add_server_flags(parser.add_argument_group("server"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_operator_flags(parser.add_argument_group("operation"))
    for add in others:
        add(parser)
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="a key clients may send, may be repeated (default: SSD_API_KEY, else none)",
    )
    group.add_argument(
        "--tool-format",
        choices=("auto", "hermes", "llama3"),
        default="auto",
        help="how the model writes tool calls (default: as its chat template says)",
    )
    group.add_argument(
        "--cors-origin", metavar="URL", action="append", default=[], help="a site whose pages may call, may be repeated"
    )
    group.add_argument("--no-page", dest="has_page", action="store_false", help="no page at /")


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-queue", type=int, metavar="N", help="sequences that may wait; more get 429 (default: all)"
    )
    group.add_argument("--rate-limit", type=int, metavar="N", help="requests a minute and key (default: no limit)")
    group.add_argument("--max-body-mb", type=float, default=32.0, metavar="MB", help="largest request (default: 32)")
    group.add_argument(
        "--read-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds a request may take to arrive (default: 60)",
    )
    group.add_argument(
        "--write-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds a client may leave its answer unread (default: 60)",
    )
    group.add_argument(
        "--request-timeout", type=float, metavar="S", help="seconds an answer may take (default: no limit)"
    )
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="seconds requests may go on after SIGTERM"
    )
    group.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="engines that may die in ten minutes (default: 3)"
    )


def _add_operator_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--admin-port", type=int, metavar="PORT", help="serve the admin endpoint there; needs a key")
    group.add_argument("--admin-host", default=_ADMIN_HOST, metavar="HOST", help="its address (default: %(default)s)")
    group.add_argument("--admin-key", metavar="KEY", help="its key (default: SSD_ADMIN_KEY)")
    group.add_argument("--access-log", action="store_true", help="log a line for every request")
    group.add_argument("--log-format", choices=("text", "json"), help="how log lines are written (default: text)")
    group.add_argument("--otlp-endpoint", metavar="URL", help="where OpenTelemetry traces go, as OTLP over HTTP")


def parse_arguments(argv: Sequence[str], *others: AddFlags) -> argparse.Namespace:
    """The flags of the command line, and behind them those of `--config`. Raises ConfigError for a wrong file."""
    parser = build_parser(*others)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    file = first.parse_known_args(argv)[0].config
    from_file = [] if file is None else list(_flags_in(Path(file), parser))
    return parser.parse_args([*from_file, *argv])


def _flags_in(path: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    """A TOML file as flags: `max-queue = 64` (or max_queue) is --max-queue 64, true a bare flag, a list one each."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    flags = {option: action for action in parser._actions for option in action.option_strings}
    for key, value in values.items():
        name = "--" + key.replace("_", "-")
        if name not in flags or name in ("--config", "--help"):
            raise ConfigError(
                f"{path}: {key!r} is no setting of the server", remedy="its settings are the flags of --help"
            )
        is_switch = flags[name].nargs == 0
        if isinstance(value, bool) != is_switch or isinstance(value, dict):
            kind = "true or false" if is_switch else "a number, a string or a list of strings"
            raise ConfigError(f"{path}: {key} is {value!r}, and should be {kind}")
        yield from _as_flags(name, value)


def _as_flags(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        if value:
            yield name
        return
    for item in value if isinstance(value, list) else [value]:
        yield f"{name}={item}"


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server that parsed flags ask for. Raises ConfigError."""
    if args.admin_port is None and (args.admin_key is not None or args.admin_host != _ADMIN_HOST):
        raise ConfigError("an admin endpoint is described, but has no port", remedy="add --admin-port")
    own_key = env.api_key()
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key) or ((own_key,) if own_key else ()),
        tool_format=args.tool_format,
        cors_origins=tuple(args.cors_origin),
        has_page=args.has_page,
        max_queue=args.max_queue,
        max_body_bytes=round(args.max_body_mb * (1 << 20)),
        rate_limit=args.rate_limit,
        read_timeout_s=args.read_timeout,
        write_timeout_s=args.write_timeout,
        request_timeout_s=args.request_timeout,
        drain_s=args.drain_timeout,
        max_restarts=args.max_restarts,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        admin_key=args.admin_key or env.admin_key(),
        has_access_log=args.access_log,
        otlp_endpoint=args.otlp_endpoint,
    )
