"""How a draft worker becomes a process of its own: started by `supervisor.py`, entered through `main`.

A plain new interpreter, not a copy of ours: no lock, thread or device context comes along, and a user's script needs
no `if __name__ == "__main__"`. The worker gets one JSON object on standard input, its line as an open file or address.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from ssd_ascend.errors import ConfigError, SsdError, TransportError
from ssd_ascend.log import fields, get_logger

if TYPE_CHECKING:
    from ssd_ascend.transport.base import Transport
    from ssd_ascend.transport.link import Link

    Entry = Callable[[Transport, Mapping[str, Any]], None]

_BOOT: Final = """
import signal
# a terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group; the parent decides
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import json, sys
spec = json.load(sys.stdin)
sys.path[:] = spec["path"]
from ssd_ascend.speculation.worker_process import main
main(spec)
"""
_PR_SET_PDEATHSIG: Final = 1
_STDERR: Final = 2

log = get_logger(__name__)


def start(entry: str, config: Mapping[str, Any], link: Link) -> subprocess.Popen[bytes]:
    """Start a worker on the other end of `link`.

    entry: "module:function", called with the line and the config; it builds a worker, says hello and serves until
    `Shutdown` or the end of the line. config: what JSON can hold.
    The worker dies with the *thread* that calls this, which therefore must live as long as the worker should.
    """
    spec = {
        "entry": entry,
        "config": dict(config),
        "address": link.address.to_dict(),
        "parent": os.getpid(),
        "path": sys.path,
    }
    data = json.dumps(spec).encode()
    child = subprocess.Popen(
        [sys.executable, "-c", _BOOT],
        stdin=subprocess.PIPE,
        stdout=_STDERR,  # our standard output is for answers
        pass_fds=link.pass_fds,
    )
    assert child.stdin is not None
    try:
        child.stdin.write(data)
        child.stdin.close()
    except BrokenPipeError:
        log.debug("the draft worker died before it read its config %s", fields(pid=child.pid))
    return child


def main(spec: Mapping[str, Any]) -> None:
    """Body of the worker process."""
    die_with_parent(spec["parent"])
    entry = resolve(spec["entry"])
    # torch takes seconds to import: a wrong entry should not cost them
    from ssd_ascend.transport.link import LinkAddress, connect

    line = connect(LinkAddress.from_dict(spec["address"]))
    try:
        entry(line, spec["config"])
    except TransportError as error:
        log.info("draft worker leaves: %s", error)
    except SsdError as error:
        log.error("draft worker: %s", error)
        sys.exit(1)
    finally:
        line.close()


def resolve(entry: str) -> Entry:
    """The function that "module:function" names."""
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ConfigError(f"{entry!r} names no function", remedy="write it as module:function")
    return cast("Entry", function)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the parent's thread ends; elsewhere the end of the line must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before we could ask
        sys.exit(1)
