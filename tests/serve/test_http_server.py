"""Connections without an engine behind them: who is told that a client has left."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from ssd_ascend.serve.http_server import HttpServer, Patience

PATIENCE_S = 30.0
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("behind", [b"", NEXT, NEXT * 3, NEXT[:9], NEXT + NEXT[:9]])
def test_who_leaves_is_told_of_to_the_request_that_runs(behind: bytes) -> None:
    """Also where others wait behind it on the connection, which are then never begun."""
    assert asyncio.run(_leave(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n" + behind)) == ["/long", "http.disconnect"]


async def _leave(sent: bytes) -> list[str]:
    """What the app saw of a client that sends this, reads some of the first answer, and goes."""
    seen: list[str] = []
    over = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await receive()  # the body, which is empty
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        seen.append((await receive())["type"])
        over.set()

    server = HttpServer(
        app,
        patience=Patience(head_s=PATIENCE_S, unread_s=PATIENCE_S, stop_s=1.0),
        refused=lambda status, client, reason: None,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(sent)
        await asyncio.wait_for(reader.readuntil(b"begun"), PATIENCE_S)
        writer.close()
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE_S)
    return seen
