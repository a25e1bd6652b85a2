"""A cable with a delay: passes bytes between its port and another, each way so many milliseconds later.

Arguments: port to relay to, delay in ms. Prints its own port. A program of its own, so that it keeps time while the
processes it connects are busy; and one without asyncio, whose timers are a millisecond late.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque

_LARGEST = 1 << 16


def relay(listener: socket.socket, port: int, delay_s: float) -> None:
    """For ever: who connects gets a line of its own to `port`; what comes in leaves when it is due, in order."""
    other: dict[socket.socket, socket.socket] = {}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([listener, *other], [], [], left)
        for end in readable:
            if end is listener:
                near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                other |= {near: far, far: near}
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                continue
            data = end.recv(_LARGEST)
            waiting.append((time.monotonic() + delay_s, other[end], data))
            if not data:
                del other[end]
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, data = waiting.popleft()
            with contextlib.suppress(OSError):  # who has left loses what arrives
                end.sendall(data) if data else end.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as door:
        print(door.getsockname()[1], flush=True)
        relay(door, int(sys.argv[1]), float(sys.argv[2]) / 1e3)
