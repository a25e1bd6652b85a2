"""What the Ray Serve application does, without Ray: requests pass to scripted servers, answers are taken apart."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from ssd_ascend.errors import ConfigError
from ssd_ascend.serve.fleet import Fleet, place
from ssd_ascend.serve.http_answers import answer
from ssd_ascend.serve.http_wire import read_answer
from ssd_ascend.serve.launch import flags_for, plan_for
from ssd_ascend.serve.ray_front import Front
from tests.serve.live import PATIENCE_S
from tests.serve.test_fleet import LONG, ask, fakes

LIMITS = 1 << 20, PATIENCE_S


def answered(raw: bytes) -> tuple[int, tuple[tuple[bytes, bytes], ...], list[bytes]]:
    async def read() -> tuple[int, tuple[tuple[bytes, bytes], ...], list[bytes]]:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        answer = await read_answer(reader)
        return answer.status, answer.headers, [data async for data in answer.body]

    return asyncio.run(read())


def test_chunks_come_as_they_were_sent() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    found = answered(head + b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n")
    assert found == (200, ((b"content-type", b"text/event-stream"),), [b"abc", b"0123456789"])


def test_a_body_of_known_length() -> None:
    status, headers, body = answered(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno")
    assert (status, dict(headers)[b"content-length"], b"".join(body)) == (404, b"2", b"no")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
def test_a_broken_answer_is_no_short_one(raw: bytes) -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        answered(raw)


def test_a_client_that_leaves_before_the_answer_ends_its_request() -> None:
    class Silent:
        """A router whose replica takes its time."""

        def __init__(self) -> None:
            self.asked, self.ended = asyncio.Event(), asyncio.Event()

        def watch(self) -> None:
            pass

        async def handle(self, request: Any, pipe: Any) -> None:
            self.asked.set()
            try:
                await asyncio.sleep(PATIENCE_S)
            finally:
                self.ended.set()

    async def run() -> None:
        front, router = Front([], *LIMITS), Silent()
        front._router = router  # type: ignore[assignment]
        scope = {"type": "http", "method": "GET", "path": "/x", "query_string": b"", "headers": []}
        asking = asyncio.create_task(front(Request(scope, _nothing)))
        await router.asked.wait()
        asking.cancel()
        await asyncio.wait_for(router.ended.wait(), PATIENCE_S)

    asyncio.run(run())


def test_a_body_has_the_servers_bounds() -> None:
    """It is read whole before a replica sees any of it."""

    async def slowly() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def refused(max_body_bytes: int, read_timeout_s: float) -> tuple[int, Any]:
        scope = {"type": "http", "method": "POST", "path": "/x", "query_string": b"", "headers": []}
        told = await Front([], max_body_bytes, read_timeout_s)(Request(scope, slowly))
        return told.status_code, json.loads(told.body)["error"]["code"]

    assert asyncio.run(refused(1000, PATIENCE_S)) == (413, "body_too_large")
    assert asyncio.run(refused(1 << 40, 0.1)) == (408, "request_timeout")


@pytest.mark.parametrize("raw", [{}, {"raw_path": b"/v1/models/%E6%A8%A1%20b%0D%0A%3F"}])
def test_a_path_is_asked_for_as_it_was_written(raw: dict[str, bytes]) -> None:
    class Echo:
        """A router that tells what it is asked."""

        def watch(self) -> None:
            pass

        async def handle(self, request: Any, pipe: Any) -> None:
            pipe.write(answer(200, request.onward("x").partition(b"\r\n")[0], "text/plain"))

    async def run() -> bytes:
        front = Front([], *LIMITS)
        front._router = Echo()  # type: ignore[assignment]
        path = "/v1/models/\u6a21 b\r\n?"
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"a=%20b", "headers": [], **raw}
        told = await front(Request(scope, _nothing))
        return b"".join([part async for part in told.body_iterator])

    assert asyncio.run(run()) == b"GET /v1/models/%E6%A8%A1%20b%0D%0A%3F?a=%20b HTTP/1.1"


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


def test_requests_pass_through_the_application(parrot: Path) -> None:
    async def run() -> None:
        fleet = Fleet(place(fakes(2, parrot)))
        front = Front([(each.role.name, each.host, each.port) for each in fleet.placed], *LIMITS)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            answer = await front(Request(scope, receive))
            await answer(scope, receive, send)

        fleet.start()
        url = "http://front"
        try:
            async with (
                asyncio.timeout(2.0 * PATIENCE_S),
                httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client,
            ):
                while (await client.get(f"{url}/health")).json()["status"] != "ready":
                    await asyncio.sleep(0.1)
                whole = await ask(client, url, LONG)
                assert whole.status_code == 200
                stream = await ask(client, url, LONG, stream=True)
                assert stream.headers["content-type"].startswith("text/event-stream")
                assert stream.text.rstrip().endswith("data: [DONE]")
                assert (await ask(client, url, "x", max_tokens=-1)).status_code == 400
                assert "ssd_router_prefix_requests_total 1" in (await client.get(f"{url}/metrics")).text
        finally:
            await fleet.close(10.0)
            await front.close()

    asyncio.run(run())


def test_who_leaves_ends_the_request_at_the_replica(parrot: Path) -> None:
    async def run() -> None:
        fleet = Fleet(place(fakes(1, parrot)))
        front = Front([(each.role.name, each.host, each.port) for each in fleet.placed], *LIMITS)
        fleet.start()
        body = b'{"prompt": "a b c", "max_tokens": 100000, "stream": true}'
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "client": ("me", 1),
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        try:
            async with asyncio.timeout(2.0 * PATIENCE_S):
                replica = front._router.replicas[0]
                front._router.watch()
                while not replica.is_ready:
                    await asyncio.sleep(0.1)
                answer = await front(Request(scope, receive))
                pieces: AsyncIterator[bytes] = answer.body_iterator
                await anext(pieces)
                assert replica.in_flight == 1
                await pieces.aclose()  # type: ignore[attr-defined]
                assert replica.in_flight == 0
        finally:
            await fleet.close(10.0)
            await front.close()

    asyncio.run(run())


def test_ray_serve_needs_ray_and_is_for_the_launcher_alone() -> None:
    with pytest.raises(ConfigError, match=r"no Ray cluster .*--ray ADDRESS"):
        plan_for(argparse.Namespace(ray_serve=True, topology="laptop-cpu", preset="smollm2-135m"))
    found = flags_for(["--topology", "laptop-cpu", "--ray-serve", "--ray", "auto", "--dtype", "float32"])
    assert found.target == found.speculator == ("--dtype", "float32")
