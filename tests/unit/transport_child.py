"""A process on the other end of a line, for the tests that kill and stop one: it answers until the line ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.link import Link, LinkAddress, connect
from ssd_ascend.transport.messages import Request
from tests.unit.plain_messages import answer

ROOT = Path(__file__).resolve().parents[2]


def start(link: Link) -> subprocess.Popen[bytes]:
    """Run this module on the other end of `link`."""
    command = [sys.executable, "-m", "tests.unit.transport_child", json.dumps(link.address.to_dict())]
    return subprocess.Popen(command, cwd=ROOT, pass_fds=link.pass_fds)


def main() -> None:
    line = connect(LinkAddress.from_dict(json.loads(sys.argv[1])), timeout_s=60.0)
    try:
        while isinstance(message := line.recv(None), Request):
            line.send(answer(message.number))
    except TransportError:
        return
    finally:
        line.close()


if __name__ == "__main__":
    main()
