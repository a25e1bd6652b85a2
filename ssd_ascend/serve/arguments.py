"""The command line of the server: its flags, `--config FILE`, and the `ServerConfig` they make. `__main__` calls it.

A flag is named after the field it sets, and stays absent unless it was given: defaults have one home, `ServerConfig`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ssd_ascend import env
from ssd_ascend.config.strict import as_toml, read_toml
from ssd_ascend.errors import ConfigError
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.launch_flags import LAUNCH_FLAGS, add_launch_arguments

_DEFAULT = ServerConfig()
_MIB = 1 << 20
AddFlags = Callable[[argparse.ArgumentParser], object]


def build_parser(*others: AddFlags) -> argparse.ArgumentParser:
    """The flags of this door: the server's own, the launcher's, and what `others` add (those of the engine).

    None may be shortened: what is passed on to other processes is told by its name.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ssd_ascend.serve",
        description="The OpenAI-compatible server.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file of flags without their dashes; flags beat it")
    _add_server_flags(parser.add_argument_group("server"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_operator_flags(parser.add_argument_group("operation"))
    add_launch_arguments(parser)
    for add in others:
        add(parser)
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", help=f"address to listen on (default: {_DEFAULT.host})")
    add("--port", type=int, help=f"port to listen on; 0 takes a free one (default: {_DEFAULT.port})")
    add(
        "--api-key", dest="api_keys", metavar="KEY", action="append",
        help="a key clients may send, may be repeated (default: SSD_API_KEY, else none)",
    )  # fmt: skip
    add("--tool-format", choices=("auto", "hermes", "llama3"),
        help="how the model writes tool calls (default: as its chat template says)")  # fmt: skip
    add("--cors-origin", dest="cors_origins", metavar="URL", action="append",
        help="a site whose pages may call, may be repeated")  # fmt: skip
    add("--no-page", dest="has_page", action="store_false", help="no page at /")


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    def seconds(flag: str, field: str, what: str, none: str = "no limit") -> None:
        default = getattr(_DEFAULT, field)
        told = none if default is None else f"{default:g}"
        group.add_argument(flag, dest=field, type=float, metavar="S", help=f"seconds {what} (default: {told})")

    add = group.add_argument
    add("--max-queue", type=int, metavar="N", help="sequences that may wait; more get 429 (default: all)")
    add("--rate-limit", type=int, metavar="N", help="requests a minute and key (default: no limit)")
    add("--max-body-mb", dest="max_body_bytes", type=_megabytes, metavar="MB",
        help=f"largest request (default: {_DEFAULT.max_body_bytes / _MIB:g})")  # fmt: skip
    seconds("--read-timeout", "read_timeout_s", "a request may take to arrive")
    seconds("--write-timeout", "write_timeout_s", "a client may leave its answer unread")
    seconds("--request-timeout", "request_timeout_s", "an answer may take")
    seconds("--drain-timeout", "drain_s", "requests may go on after SIGTERM")
    add("--max-restarts", type=int, metavar="N",
        help=f"engines that may be lost in ten minutes (default: {_DEFAULT.max_restarts})")  # fmt: skip
    seconds(
        "--step-timeout",
        "step_timeout_s",
        "a step of the engine may take before the engine is replaced; 0: any",
        none="300, on a CPU any",
    )


def _megabytes(text: str) -> int:
    """Bytes. argparse.ArgumentTypeError for what is no number of megabytes."""
    try:
        return round(float(text) * _MIB)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of megabytes") from None


def _add_operator_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--admin-port", type=int, metavar="PORT", help="serve the admin endpoint there; needs a key")
    add("--admin-host", metavar="HOST", help=f"its address (default: {_DEFAULT.admin_host})")
    add("--admin-key", metavar="KEY", help="its key (default: SSD_ADMIN_KEY)")
    add("--access-log", dest="has_access_log", action="store_true", help="log a line for every request")
    add("--log-format", choices=env.LOG_FORMATS, help="how log lines are written (default: SSD_LOG_FORMAT, else text)")
    add("--otlp-endpoint", metavar="URL", help="where OpenTelemetry traces go, as OTLP over HTTP")


def parse_arguments(argv: Sequence[str], *others: AddFlags) -> argparse.Namespace:
    """The flags of the command line, and behind them those of `--config`. Raises ConfigError for a wrong file."""
    return build_parser(*others).parse_args([*flags_of_file(argv, *others), *argv])


def flags_of_file(argv: Sequence[str], *others: AddFlags) -> list[str]:
    """The flags of the file that `--config` names on this command line; none where it names none."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--model")
    named = first.parse_known_args(argv)[0]
    if named.config is None:
        return []
    flags = list(_flags_in(Path(named.config), build_parser(*others)))
    if named.model is None:
        return flags
    # one engine was asked for, which beats the plan of a file: the servers of a plan are started with its file
    return [flag for flag in flags if flag.partition("=")[0] not in LAUNCH_FLAGS]


def _flags_in(path: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    """A TOML file as flags: `max-queue = 64` (or max_queue) is --max-queue 64, true a bare flag, a list one each."""
    _, values = read_toml(path)
    parser.exit_on_error = False
    actions = {option: action for action in parser._actions for option in action.option_strings}
    keys: dict[str, str] = {}
    for key, value in values.items():
        name = "--" + key.replace("_", "-")
        if (twin := keys.setdefault(name, key)) != key:
            raise ConfigError(f"{path}: {twin!r} and {key!r} are one setting", remedy="leave one of them out")
        if name not in actions or name in ("--config", "--help"):
            raise ConfigError(
                f"{path}: {key!r} is no setting of the server", remedy="its settings are the flags of --help"
            )
        flags = _as_flags(actions[name], name, value, f"{path}: {key}")
        try:
            parser.parse_known_args(flags)
        except argparse.ArgumentError as error:  # who reads the usage would look for a flag that was not given
            raise ConfigError(f"{path}: {key}: {error.message}") from error
        yield from flags


def _as_flags(action: argparse.Action, name: str, value: Any, where: str) -> list[str]:
    """The flags that one setting stands for. ConfigError for a value of another kind than `action` takes."""
    is_switch, is_repeated = action.nargs == 0, isinstance(action, argparse._AppendAction)
    items = value if isinstance(value, list) and is_repeated else [value]
    if any(isinstance(item, bool) != is_switch or not isinstance(item, bool | int | float | str) for item in items):
        kind = "a string or a list of strings" if is_repeated else "a number or a string"
        raise ConfigError(f"{where} is {as_toml(value)}, and should be {'true or false' if is_switch else kind}")
    if is_switch:
        return [name] if value else []
    return [f"{name}={item}" for item in items]


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server that parsed flags, and the environment behind them, ask for. Raises ConfigError."""
    given = {name: value for name, value in vars(args).items() if name in ServerConfig.__dataclass_fields__}
    if "admin_port" not in given and given.keys() & {"admin_key", "admin_host"}:
        raise ConfigError("an admin endpoint is described, but has no port", remedy="add --admin-port")
    listed = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    if "api_keys" not in given and (key := env.api_key()) is not None:
        given["api_keys"] = (key,)
    if "admin_key" not in given:
        given["admin_key"] = env.admin_key()
    return ServerConfig(**{**given, **listed})
