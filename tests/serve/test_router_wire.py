"""The router reads requests under the server's rules, and what it sends onward says the same in one way only."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.http_answers import answer, error
from ssd_ascend.serve.http_parser import BadRequestError
from ssd_ascend.serve.http_wire import Request, read_request
from ssd_ascend.serve.router import Router
from ssd_ascend.serve.routing import Replica
from tests.serve.odd_requests import ALLOWED, REFUSED, get, post

MOST = 1 << 20


def read(sent: bytes, *, piece: int = 1 << 16) -> Request | None:
    async def main() -> Request | None:
        reader = asyncio.StreamReader()
        reading = asyncio.create_task(read_request(reader, lambda said: None, MOST))
        for start in range(0, len(sent), piece):
            reader.feed_data(sent[start : start + piece])
            await asyncio.sleep(0)
        reader.feed_eof()
        return await reading

    return asyncio.run(main())


@pytest.mark.parametrize(("sent", "status"), REFUSED.values(), ids=REFUSED)
def test_what_could_be_misunderstood_is_refused(sent: bytes, status: int) -> None:
    with pytest.raises(BadRequestError) as refused:
        read(sent)
    assert refused.value.status == status


@pytest.mark.parametrize("sent", ALLOWED.values(), ids=ALLOWED)
@pytest.mark.parametrize("piece", [7, 1 << 16])
def test_what_is_clear_is_read_in_pieces_of_any_size(sent: bytes, piece: int) -> None:
    found = read(sent, piece=piece)
    assert found is not None
    assert (found.path, found.body) == (("/tokenize", b"abc") if found.method == "POST" else ("/health", b""))


def test_onward_a_body_has_one_length_and_nothing_of_the_line_before() -> None:
    found = read(ALLOWED["a trailer"].replace(b"Host: x", b"Host: x\r\nConnection: keep-alive\r\nX-Mine: 1"))
    assert found is not None
    head, _, body = found.onward("10.0.0.1").partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /tokenize HTTP/1.1", b"host: x", b"x-mine: 1",
        b"Connection: close", b"X-Forwarded-For: 10.0.0.1", b"Content-Length: 3",
    ]  # fmt: skip
    assert body == b"abc"


def test_onward_a_request_of_http_1_0_is_one() -> None:
    """Its answer is passed on byte for byte, and must be one for such a client."""
    found = read(post(b"Content-Length: 3\r\nExpect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert found is not None
    assert found.onward("x").startswith(b"POST /tokenize HTTP/1.0\r\nhost: x\r\n")


def test_what_follows_a_request_is_nobodys() -> None:
    for tail in (get(), b"\r\n", b"\x00garbage"):
        found = read(post(b"Content-Length: 3\r\n") + tail)
        assert found is not None
        assert found.body == b"abc"


def test_a_body_is_bounded_by_what_it_says_and_by_what_comes() -> None:
    for sent in (
        post(b"Content-Length: %d\r\n" % (MOST + 1)),
        post(b"Transfer-Encoding: chunked\r\n", b"%x\r\n" % (MOST + 1) + b"a" * (MOST + 1)),
    ):
        with pytest.raises(BadRequestError) as refused:
            read(sent)
        assert refused.value.status == 413


def test_a_client_that_leaves() -> None:
    assert read(b"") is None
    with pytest.raises(BadRequestError, match="left"):
        read(post(b"Content-Length: 9\r\n"))


def answer_to(sent: bytes, **limits: Any) -> bytes:
    """What a router without replicas says."""

    async def main() -> bytes:
        front = Router([], ServerConfig(**limits))
        port = await front.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        said = await reader.read(-1)
        writer.close()
        await front.close(1.0)
        return said

    return asyncio.run(main())


@pytest.mark.parametrize("sent", [b"GET /hea", post(b"Content-Length: 9\r\n")], ids=["half a head", "half a body"])
def test_the_router_does_not_wait_for_ever(sent: bytes) -> None:
    assert answer_to(sent, read_timeout_s=0.1).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "sent", [b"GET /health\r\n", post(b"Content-Length: 9\r\n")], ids=["half a head", "half a body"]
)
def test_who_leaves_in_the_middle_of_a_request_leaves_no_trace(sent: bytes) -> None:
    faults: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        front = Router([], ServerConfig())
        port = await front.start("127.0.0.1", 0)
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
        await asyncio.sleep(0.3)
        await front.close(1.0)

    asyncio.run(main())
    assert faults == []


@pytest.mark.parametrize("sent", [b"", get()[:9], post(b"Content-Length: 9\r\n")], ids=["nothing", "half", "no body"])
def test_who_stops_a_router_waits_for_no_connection_without_a_request(sent: bytes) -> None:
    faults: list[dict[str, Any]] = []

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        front = Router([], ServerConfig())
        port = await front.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(front.close(drain_s=1e6), 60.0)
        said = await reader.read(-1)
        writer.close()
        return said

    assert asyncio.run(main()) == b""
    assert faults == []


def test_an_answer_that_outlasts_the_drain_is_cut_and_leaves_nothing_behind() -> None:
    faults: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        replica = Replica("silent", *silent.sockets[0].getsockname())
        replica.is_ready = True
        front = Router([replica], ServerConfig())
        port = await front.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get(line=b"GET /v1/models HTTP/1.1"))
        while not replica.in_flight:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(front.close(drain_s=0.1), 60.0)
        assert await reader.read(-1) == b""
        writer.close()
        assert replica.in_flight == 0
        silent.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert faults == []


def test_a_request_that_ends_its_replicas_does_not_get_them_all() -> None:
    taken = []

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A replica that is well, and gone as soon as it has a request."""
        if b"/health" in await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer(200, b'{"status": "ready"}', "application/json"))
        else:
            taken.append(writer.get_extra_info("sockname")[1])
        writer.close()

    async def main() -> bytes:
        servers = [await asyncio.start_server(end, "127.0.0.1", 0) for _ in range(4)]
        replicas = [Replica(f"r{i}", *server.sockets[0].getsockname()) for i, server in enumerate(servers)]
        front = Router(replicas, ServerConfig())
        port = await front.start("127.0.0.1", 0)
        while not all(replica.is_ready for replica in replicas):
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get(line=b"GET /v1/models HTTP/1.1"))
        said = await reader.read(-1)
        writer.close()
        await front.close(1.0)
        for server in servers:
            server.close()
        return said

    said = asyncio.run(main())
    assert said.startswith(b"HTTP/1.1 502 ")
    assert error_in(said)["message"] == "2 replicas ended while they had this request"
    assert len(set(taken)) == len(taken) == 2


def error_in(said: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    return error


@pytest.mark.parametrize("status", [400, 408, 413, 414, 431, 501, 505])
def test_what_a_client_did_wrong_is_not_called_our_fault(status: int) -> None:
    """Where HTTP has a 5xx for it, too: who reads "server_error" would ask again."""
    assert error_in(error(status, "so it is"))["type"] == "invalid_request_error"


def test_the_router_calls_an_error_as_a_server_does() -> None:
    said = answer_to(get(line=b"GET /v1/models HTTP/1.1"))
    assert b"\r\nRetry-After: 1\r\n" in said
    assert (error_in(said)["type"], error_in(said)["code"]) == ("server_error", "engine_unavailable")
    large = answer_to(post(b"Content-Length: 3\r\n"), max_body_bytes=2)
    assert (error_in(large)["type"], error_in(large)["code"]) == ("invalid_request_error", "body_too_large")


def test_health_is_the_routers_own_however_it_is_asked_for() -> None:
    assert b'"replicas": []' in answer_to(get(line=b"GET http://x/health?a=b HTTP/1.1"))
    assert answer_to(get(line=b"GET http://[::1/health HTTP/1.1")).startswith(b"HTTP/1.1 400 ")
    assert answer_to(get(line=b"GET * HTTP/1.1")).startswith(b"HTTP/1.1 503 ")


def test_who_pipelines_or_leaves_bytes_behind_has_not_left() -> None:
    assert b'"status": "starting"' in answer_to(get() + b"\r\n" + get())


@pytest.mark.parametrize("line", [b"/health", b"/metrics", b"/v1/models"])
def test_head_gets_the_head_alone(line: bytes) -> None:
    asked, got = (answer_to(get(line=b"%b %b HTTP/1.1" % (method, line))) for method in (b"HEAD", b"GET"))
    assert asked == got.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def test_who_asks_before_it_sends_a_body_is_told_to_go_on() -> None:
    said = answer_to(post(b"Content-Length: 3\r\nExpect: 100-continue\r\n"))
    assert said.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 ")
    old = post(b"Content-Length: 3\r\nExpect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert answer_to(old).startswith(b"HTTP/1.1 503 ")
    refused = answer_to(post(b"Content-Length: 10\r\nExpect: 100-continue\r\n", b""), max_body_bytes=9)
    assert refused.startswith(b"HTTP/1.1 413 ")
