"""A line over devices: announced before it is received, dead as soon as the other side is, and idle for ever."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.device import DevicePeer
from ssd_ascend.transport.link import DeviceLink, LinkAddress, Meeting, connect
from ssd_ascend.transport.messages import Shutdown
from tests.unit.plain_messages import answer, request, same

MEETING = Meeting("tests.unit.device_exchange:meet", ours=2, theirs=5)


@pytest.fixture
def ends() -> Iterator[tuple[Transport, Transport]]:
    """Target's and worker's."""
    link = DeviceLink(MEETING, generation=3)
    assert link.accept(0.05) is None  # nobody is there yet
    address = LinkAddress.from_dict(link.address.to_dict())
    theirs: list[Transport] = []
    inherited = replace(address, fd=os.dup(address.fd))  # as a child process would have it
    worker = threading.Thread(target=lambda: theirs.append(connect(inherited, timeout_s=5.0)))
    worker.start()
    ours = link.accept(5.0)
    worker.join()
    assert ours is not None
    yield ours, theirs[0]
    for end in (ours, theirs[0]):
        end.close()
    link.close()


def test_messages_of_any_size_both_ways_at_once(ends: tuple[Transport, Transport]) -> None:
    ours, theirs = ends
    for size in (0, 4000, 9000, 1_000_000):
        ours.send(request(size))
        theirs.send(answer(1, payload_bytes=size))
        assert same(theirs.recv(5.0), request(size))
        assert same(ours.recv(5.0), answer(1, payload_bytes=size))


def test_a_silent_line_is_no_dead_line(ends: tuple[Transport, Transport]) -> None:
    ours, theirs = ends
    assert ours.recv(0.05) is None
    theirs.send(Shutdown())
    assert isinstance(ours.recv(5.0), Shutdown)


def test_the_other_side_s_end_shows_at_once(ends: tuple[Transport, Transport]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(TransportError, match="gone"):
        ours.recv(5.0)
    with pytest.raises(TransportError):
        ours.send(Shutdown())


def test_what_is_announced_and_never_comes_is_an_error() -> None:
    class Broken:
        device = torch.device("cpu")

        def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
            raise TransportError("not taken")

        def recv(self, buffer: torch.Tensor, timeout_s: float) -> None:
            raise TransportError(f"nothing within {timeout_s:g} s")

    here, there = socket.socketpair()
    peer = DevicePeer(Broken(), here, timeout_s=7.0)
    there.send(b"\x01")
    with pytest.raises(TransportError, match="within 7 s"):
        peer.recv(torch.empty(1, dtype=torch.uint8))
    with pytest.raises(TransportError, match="not taken"):
        peer.send(torch.empty(1, dtype=torch.uint8), 1.0)
    there.close()
    with pytest.raises(TransportError):
        peer.recv(torch.empty(1, dtype=torch.uint8))
    peer.close()
    peer.close()


def test_a_meeting_place_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    link = DeviceLink(MEETING, generation=1)
    address = replace(link.address, fd=os.dup(link.address.fd), port=1)
    with pytest.raises(TransportError, match="cannot reach the store"):
        connect(address, timeout_s=0.5)
    link.close()
    os.close(address.fd)
