"""Every kind of line keeps the contract of `Transport`, within one process, and when the process at its end dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ssd_ascend.errors import ConfigError, TransportError
from ssd_ascend.transport import tcp
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.link import LINK_KINDS, LinkAddress, connect, make_link
from ssd_ascend.transport.messages import Shutdown
from ssd_ascend.transport.socket import SocketTransport
from ssd_ascend.transport.wire import encode
from tests.unit import transport_child
from tests.unit.plain_messages import answer, request, same

LONG_S = 60.0
"""For waits that end early when all is well."""


def join(kind: str) -> tuple[Transport, Transport]:
    """Both ends of a line in this process."""
    link = make_link(kind, generation=3)
    address = link.address
    if address.fd >= 0:
        address = dataclasses.replace(address, fd=os.dup(address.fd))
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(connect, address, timeout_s=LONG_S)
        ours = link.accept(LONG_S)
        link.close()
        assert ours is not None
        return ours, theirs.result()


@pytest.fixture(params=LINK_KINDS)
def line(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    ends = join(request.param)
    yield ends
    for end in ends:
        end.close()


def later(action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.1, action)
    timer.start()
    return timer


def test_messages_arrive_whole_and_in_order(line: tuple[Transport, Transport]) -> None:
    ours, theirs = line
    sent = [answer(n, payload_bytes=size) for n, size in enumerate((0, 4000, 9000, 40_000, 0, 5_000_000, 0))]
    sender = threading.Thread(target=lambda: [theirs.send(message) for message in sent])
    sender.start()
    for message in sent:
        assert same(ours.recv(LONG_S), message)
    sender.join()
    ours.send(request(5))
    assert same(theirs.recv(None), request(5))


def test_a_poll_and_a_wait_without_news_give_none(line: tuple[Transport, Transport]) -> None:
    ours, theirs = line
    assert ours.recv(0) is None
    before = time.monotonic()
    assert ours.recv(0.05) is None
    assert time.monotonic() - before >= 0.04
    later(lambda: theirs.send(Shutdown()))
    assert ours.recv(LONG_S) == Shutdown()


def test_close_wakes_the_other_side_and_ends_the_line(line: tuple[Transport, Transport]) -> None:
    ours, theirs = line
    later(theirs.close)
    with pytest.raises(TransportError):
        ours.recv(None)
    for use in (lambda: ours.recv(0), lambda: ours.send(request()), lambda: theirs.recv(None)):
        with pytest.raises(TransportError):
            use()
    theirs.close()


def test_close_wakes_a_recv_of_its_own_side(line: tuple[Transport, Transport]) -> None:
    ours, _ = line
    later(ours.close)
    with pytest.raises(TransportError):
        ours.recv(None)


@contextlib.contextmanager
def child_on(kind: str) -> Iterator[tuple[Transport, subprocess.Popen[bytes]]]:
    """A line to a process of its own that answers requests."""
    link = make_link(kind)
    child = transport_child.start(link)
    line = None
    try:
        line = link.accept(LONG_S)
        link.close()
        assert line is not None
        line.send(request(4))
        assert same(line.recv(LONG_S), answer(4))
        yield line, child
    finally:
        child.kill()
        child.wait()
        if line is not None:
            line.close()


def flood(line: Transport) -> None:
    for number in range(50):
        line.send(answer(number, payload_bytes=1_000_000))


@pytest.mark.parametrize("kind", ["unix", "gloo"])
def test_a_process_that_stops_is_waited_for_and_one_that_dies_is_noticed(kind: str) -> None:
    with child_on(kind) as (line, child):
        child.send_signal(signal.SIGSTOP)
        line.send(request(5))
        assert line.recv(0.1) is None
        child.send_signal(signal.SIGCONT)
        assert same(line.recv(LONG_S), answer(5))
        child.kill()
        with pytest.raises(TransportError):
            line.recv(LONG_S)
        with pytest.raises(TransportError):
            line.send(request(6))


def test_a_stopped_process_cannot_hold_a_sender_over_gloo() -> None:
    with child_on("gloo") as (line, child):
        child.send_signal(signal.SIGSTOP)
        vars(line)["_send_timeout_s"] = 0.3
        with pytest.raises(TransportError, match="does not read"):
            flood(line)
        with pytest.raises(TransportError):
            line.recv(LONG_S)


def test_a_side_that_does_not_read_cannot_hold_a_sender() -> None:
    left, right = socket.socketpair()
    line = SocketTransport(left, send_timeout_s=0.2)
    with pytest.raises(TransportError, match="does not read"):
        flood(line)
    with pytest.raises(TransportError, match="does not read"):
        line.recv(LONG_S)
    line.close()
    right.close()


def test_a_busy_peer_does_not_hold_a_sender_and_gets_everything_in_order() -> None:
    left, right = SocketTransport.pair()
    sent = [answer(1, payload_bytes=8 << 20), answer(2), answer(3, payload_bytes=1 << 20), answer(4)]
    for message in sent:  # nobody reads: this would never end, were it not for the backlog
        left.send(message)
    for message in sent:
        assert same(right.recv(LONG_S), message)
    left.send(answer(5))
    assert same(right.recv(LONG_S), answer(5))
    left.close()
    right.close()


def test_closing_drops_what_a_busy_peer_did_not_take() -> None:
    left, right = SocketTransport.pair()
    left.send(answer(1, payload_bytes=8 << 20))
    left.close()
    with pytest.raises(TransportError):
        right.recv(LONG_S)
    with pytest.raises(TransportError):
        left.send(answer(2))
    right.close()


def test_a_frame_may_come_in_pieces() -> None:
    left, right = socket.socketpair()
    end = SocketTransport(left)
    data = encode(answer(1, payload_bytes=100)) + encode(answer(2, payload_bytes=40_000)) + encode(answer(3))
    got = []
    for at in range(0, len(data), 37):
        right.sendall(data[at : at + 37])
        message = end.recv(0)
        got += [] if message is None else [message]
    assert same(got, [answer(1, payload_bytes=100), answer(2, payload_bytes=40_000), answer(3)])
    end.close()
    right.close()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: there\r\nAccept: */*\r\n\r\n", "bad magic"),
        (encode(answer())[:60], "closed the line"),
        (encode(answer())[:-1] + b"\xff", "damaged message"),
    ],
)
def test_nonsense_ends_the_line(data: bytes, complaint: str) -> None:
    left, right = socket.socketpair()
    end = SocketTransport(left)
    right.sendall(data)
    right.shutdown(socket.SHUT_WR)
    with pytest.raises(TransportError, match=complaint):
        end.recv(LONG_S)
    with pytest.raises(TransportError, match=complaint):
        end.send(request())
    assert right.recv(10) == b""  # and the other side is told at once
    end.close()
    right.close()


def test_a_message_above_the_limit_is_refused_on_both_ends() -> None:
    left, right = socket.socketpair()
    small, large = SocketTransport(left, limit=1 << 16), SocketTransport(right)
    with pytest.raises(TransportError, match="limit is 65536"):
        small.send(answer(payload_bytes=1 << 17))
    large.send(answer(payload_bytes=1 << 17))
    with pytest.raises(TransportError, match="expected 40 to 65536"):
        small.recv(LONG_S)
    small.close()
    large.close()


SECRET = "a secret of some length"


@pytest.fixture
def listener() -> Iterator[tcp.Listener]:
    listener = tcp.Listener("127.0.0.1", 0, SECRET)
    yield listener
    listener.close()


def test_only_who_knows_the_secret_gets_in(listener: tcp.Listener) -> None:
    def call(secret: str) -> SocketTransport:
        return tcp.connect("127.0.0.1", listener.port, secret, timeout_s=LONG_S)

    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, LONG_S)
        with pytest.raises(TransportError, match="did not let us in"):
            call("another secret of some length")
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
        with socket.create_connection(("127.0.0.1", listener.port)):
            pass
        ours = call(SECRET)
        theirs = accepted.result()
    assert theirs is not None
    ours.send(request())
    assert same(theirs.recv(LONG_S), request())
    ours.close()
    theirs.close()


def test_a_listener_shows_no_proof_to_who_has_none(listener: tcp.Listener) -> None:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 1.0)
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            greeting = stranger.recv(1000)
            assert len(greeting) == 40
            assert SECRET.encode() not in greeting
            stranger.sendall(greeting)  # the echo of its own greeting
            stranger.sendall(bytes(32))
            assert stranger.recv(1000) == b""
        assert accepted.result() is None


def test_another_release_and_a_silent_caller_are_dropped(
    listener: tcp.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 1.0)
        with socket.create_connection(("127.0.0.1", listener.port)) as old:
            old.recv(1000)
            old.sendall(struct.pack("=4sI32s", b"SSDT", 0, bytes(32)))
            assert old.recv(1000) == b""
        with socket.create_connection(("127.0.0.1", listener.port)) as silent:
            assert len(silent.recv(1000)) == 40
            assert silent.recv(1000) == b""
        assert accepted.result() is None


def test_nobody_there_is_an_error_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TransportError, match=f"cannot reach 127.0.0.1:{port}") as error:
        tcp.connect("127.0.0.1", port, SECRET, timeout_s=5.0)
    assert error.value.remedy
    with pytest.raises(TransportError, match="a secret of 3 characters"):
        tcp.Listener("127.0.0.1", 0, "abc")


@pytest.mark.parametrize("kind", ["tcp", "gloo"])  # a socket pair is connected from birth
def test_nobody_coming_gives_none(kind: str) -> None:
    link = make_link(kind)
    assert link.accept(0.05) is None
    link.close()
    link.close()


def test_an_address_travels_as_json_and_keeps_its_secret_out_of_logs() -> None:
    link = make_link("tcp", generation=2)
    address = link.address
    assert LinkAddress.from_dict(json.loads(json.dumps(address.to_dict()))) == address
    assert address.secret not in repr(address)
    link.close()
    with pytest.raises(ConfigError, match="port"):
        LinkAddress.from_dict({"kind": "tcp", "port": "80"})
    with pytest.raises(ConfigError, match="unix"):
        LinkAddress.from_dict({"kind": "pigeon"})
    with pytest.raises(ConfigError, match="prot"):
        LinkAddress.from_dict({"kind": "tcp", "prot": 1})
    with pytest.raises(ConfigError, match="pigeon"):
        make_link("pigeon")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_lines_leave_no_open_files() -> None:
    join("gloo")[0].close()  # what torch opens once and keeps
    before = open_files()
    for kind in ("unix", "tcp"):
        for _ in range(3):
            for end in join(kind):
                end.close()
    assert open_files() <= before
