"""A cable with a delay between two network namespaces: passes packets from one to the other, each so many ms later.

Arguments: two namespaces, delay in ms. Makes the interfaces "here" and "there" and says "ready". A program of its own,
so that it keeps time while the processes at its ends are busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LARGEST = 1 << 16


def open_end(namespace: str, name: str) -> int:
    """A packet interface in a namespace; the descriptor stays good when we have left it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def pass_on(ends: tuple[int, int], delay_s: float) -> None:
    """For ever: what is read at one end is written at the other when it is due; in order, for the delay is one."""
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ends, [], [], left)
        for end in readable:
            waiting.append((time.monotonic() + delay_s, other[end], os.read(end, _LARGEST)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # an interface that is down loses what arrives
                os.write(end, packet)


if __name__ == "__main__":
    ends = (open_end(sys.argv[1], "here"), open_end(sys.argv[2], "there"))
    print("ready", flush=True)
    pass_on(ends, float(sys.argv[3]) / 1e3)
