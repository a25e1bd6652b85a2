"""`python -m ssd_ascend.serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from ssd_ascend import env, log
from ssd_ascend.errors import SsdError, needs_packages
from ssd_ascend.flags import add_engine_arguments, engine_config
from ssd_ascend.serve.arguments import flags_of_file, parse_arguments, server_config
from ssd_ascend.serve.launch_flags import check_launch_flags


def main(argv: Sequence[str] | None = None, *, engine_command: Sequence[str] | None = None) -> int:
    """Serve; returns the exit status. `engine_command` replaces the engine process, for tests."""
    env.let_threads_sleep()
    try:
        given = sys.argv[1:] if argv is None else argv
        args = parse_arguments(given, add_engine_arguments)
        if (log_format := getattr(args, "log_format", None)) is not None:
            env.hand_down({"SSD_LOG_FORMAT": log_format})  # the engine and its workers write to the same place
            log.use_format(log_format)
        check_launch_flags(args)
        if hasattr(args, "topology"):
            from ssd_ascend.serve.launch import flags_for, launch  # the planner, which one engine needs nothing of

            flags = flags_for(given, flags_of_file(given, add_engine_arguments))
            launch(args, flags, _announce, lambda words: engine_config(parse_arguments(words, add_engine_arguments)))
            return 0
        _check_device_without_model(args)
        config, serving = engine_config(args), server_config(args)
        if config.tensor_parallel > 1:
            from ssd_ascend.engine.rank import follow  # torch: only who may be one of several ranks needs it here

            if follow(config):
                return 0
        with needs_packages(extra="[serve]"):
            from ssd_ascend.engine.process_link import ENGINE_COMMAND
            from ssd_ascend.serve.server import run_server
        command = engine_command or ENGINE_COMMAND
        asyncio.run(run_server(config, serving, announce=_announce, engine_command=command))
    except SsdError as error:
        print(f"ssd_ascend.serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there was anything to drain; from then on the signal is the server's
        return 128 + signal.SIGINT
    return 0


def _check_device_without_model(args: argparse.Namespace) -> None:
    """Who names a device and no model yet hears first what the device lacks: without it a model is of no use."""
    given = vars(args)
    device = given.get("device") or env.device()
    if device is not None and not (given.get("model") or env.target_model()):
        from ssd_ascend.backends.registry import load_backend  # torch, which the front end does not need

        load_backend(device)


def _announce(line: str) -> None:
    """Say a line on standard output; who serves from a full disk, or for a reader that has gone, goes on serving."""
    try:
        print(line, flush=True)
    except OSError as error:
        log.get_logger(__name__).warning("cannot write to standard output (%s): %s", error.strerror, line)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is still buffered must not fail again at exit


if __name__ == "__main__":
    sys.exit(main())
