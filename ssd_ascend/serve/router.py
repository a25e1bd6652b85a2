"""A front for several servers of one model: passes each request to the replica that suits it, streams as they come.

Replicas come and go: one that does not answer its probe, or breaks before its first byte, is passed over, and the
request goes to the next; but not through all of them, as it may be what breaks them. `launch.py` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from ssd_ascend.log import get_logger
from ssd_ascend.serve.addresses import bind
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.http_answers import answer, error, head_of
from ssd_ascend.serve.http_parser import MAX_HEAD_BYTES, BadRequestError
from ssd_ascend.serve.http_wire import Request, read_request
from ssd_ascend.serve.routing import Replica, block_names, choose

_CHUNK = 64 << 10
_CONNECT_S = 2.0
_LINGER_S = 1.0
_MOST_BREAKS = 2
"""Replicas that may end while they have a request; after these it goes to no other."""
_PROBE_S = 5.0
_PROBE_EVERY_S = 0.5
log = get_logger(__name__)


class Passed(Enum):
    """What became of a request that was given to a replica."""

    ANSWERED = auto()
    NOT_TAKEN = auto()
    BROKE = auto()
    """It had the request, and ended before a byte of its answer."""


class Sink(Protocol):
    """Where an answer is written: a connection's writer, or what stands for one."""

    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...
    def get_extra_info(self, name: str) -> Any: ...


class Health(NamedTuple):
    """What a server says of itself at /health."""

    takes_requests: bool
    status: str
    reason: str


class Router:
    """The replicas, and the connections under way. Lives in one asyncio loop. Of `limits`, it holds to those on what a
    request may be: how large, and how long in coming."""

    def __init__(self, replicas: Sequence[Replica], limits: ServerConfig | None = None) -> None:
        self.replicas = list(replicas)
        self._limits = limits or ServerConfig()
        self._served_by_prefix = 0
        self._open: set[asyncio.Task[None]] = set()
        self._without_request: set[asyncio.Task[None]] = set()
        """Of those that are open, who has not sent a whole request yet."""
        self._probing: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and watch the replicas; returns the port. Raises ConfigError when the address cannot be had."""
        sock = bind(host, port)
        self._server = await asyncio.start_server(self._meet, sock=sock, limit=MAX_HEAD_BYTES)
        self.watch()
        return int(sock.getsockname()[1])

    def watch(self) -> None:
        """Watch the replicas from now on, in the loop that calls."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe_all())

    async def wait_until_ready(self) -> None:
        """Return once every replica has been ready."""
        missing = set(self.replicas)
        while missing:
            missing -= {replica for replica in missing if replica.is_ready}
            await asyncio.sleep(_PROBE_EVERY_S / 2.0)

    async def close(self, drain_s: float) -> None:
        """Take no more, and give what is under way so long to end. Nobody waits for a connection without a request."""
        if self._server is not None:
            self._server.close()
        await _end(self._without_request)
        try:
            if self._open:
                await asyncio.wait(self._open, timeout=drain_s)
        finally:
            await _end([*self._open, *([self._probing] if self._probing else [])])

    # -- one connection --------------------------------------------------------------------------------------------

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self._without_request.add(task)
        try:
            request = await self._request(reader, writer)
            self._without_request.discard(task)
            if request is not None:
                await self._converse(request, reader, writer)
        except ConnectionError:
            pass  # the client has left, which ends its request
        except asyncio.CancelledError:
            pass  # by `close`; asyncio would take it for a fault in its own callback
        finally:
            self._open.discard(task)
            self._without_request.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
        """What a client asks; None when it left without a word, or was refused."""
        patience_s = self._limits.read_timeout_s
        try:
            async with asyncio.timeout(patience_s):
                return await read_request(reader, writer.write, self._limits.max_body_bytes)
        except TimeoutError:
            late = BadRequestError(408, f"the request took longer than {patience_s:g} s to arrive")
            await _refuse(late, reader, writer)
        except BadRequestError as bad:
            await _refuse(bad, reader, writer)
        return None

    async def _converse(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a request, for as long as its client is there."""
        passing = asyncio.create_task(self.handle(request, writer))
        leaving = asyncio.create_task(_read_to_end(reader))  # nothing more is due from the client but its leaving
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end((leaving, passing))
        if not passing.cancelled():
            passing.result()

    async def handle(self, request: Request, sink: Sink) -> None:
        """Answer a request, ourselves or through a replica."""
        own = self._own(request)
        if own is None:
            await self._pass_on(request, sink)
        else:
            await _say(request, own, sink)

    def _own(self, request: Request) -> bytes | None:
        """What the router answers itself."""
        path = request.resource
        if request.method not in ("GET", "HEAD"):
            return None
        if path == "/health":
            ready = sum(replica.is_ready for replica in self.replicas)
            status = "starting" if not ready else "ready" if ready == len(self.replicas) else "degraded"
            body = {
                "status": status,
                "replicas": [
                    {"name": r.name, "ready": r.is_ready, "in_flight": r.in_flight, "reason": r.reason or None}
                    for r in self.replicas
                ],
            }
            return answer(200 if ready else 503, json.dumps(body).encode(), "application/json")
        if path == "/metrics":
            return answer(200, self._metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
        return None

    async def _pass_on(self, request: Request, writer: Sink) -> None:
        names = block_names(request.body) if request.method == "POST" else []
        tried: list[Replica] = []
        breaks = 0
        while (replica := choose([r for r in self.replicas if r not in tried], names)) is not None:
            tried.append(replica)
            self._served_by_prefix += replica.held_blocks(names) > 0
            replica.remember(names)
            replica.in_flight += 1
            replica.requests += 1
            try:
                passed = await _relay(request, replica, writer, may_refuse=self._others_ready(tried))
            finally:
                replica.in_flight -= 1
            if passed is Passed.ANSWERED:
                return
            if passed is Passed.BROKE:
                breaks += 1
                log.warning("%s ended while it had a request (%d so far of this one)", replica.name, breaks)
            if breaks == _MOST_BREAKS:
                return await _say(request, error(502, f"{breaks} replicas ended while they had this request"), writer)
            log.info("%s passed a request on to another replica", replica.name)
        return await _say(request, error(503, "no replica is ready"), writer)

    def _others_ready(self, tried: Sequence[Replica]) -> bool:
        return any(replica.is_ready and replica not in tried for replica in self.replicas)

    # -- watching --------------------------------------------------------------------------------------------------

    async def _probe_all(self) -> None:
        while True:
            await asyncio.gather(*(self._probe(replica) for replica in self.replicas))
            await asyncio.sleep(_PROBE_EVERY_S)

    async def _probe(self, replica: Replica) -> None:
        was_ready = replica.is_ready
        try:
            async with asyncio.timeout(_PROBE_S):
                replica.is_ready, _, replica.reason = await health_of(replica)
        except (OSError, TimeoutError, ValueError) as problem:
            replica.is_ready = False
            replica.reason = str(problem) or "no answer"
        if was_ready and not replica.is_ready:
            replica.forget()
            log.warning("%s is out: %s", replica.name, replica.reason)
        elif replica.is_ready and not was_ready:
            log.info("%s is in", replica.name)

    def _metrics(self) -> str:
        lines = ["# TYPE ssd_router_requests_total counter"]
        lines += [f'ssd_router_requests_total{{replica="{r.name}"}} {r.requests}' for r in self.replicas]
        lines += ["# TYPE ssd_router_in_flight gauge"]
        lines += [f'ssd_router_in_flight{{replica="{r.name}"}} {r.in_flight}' for r in self.replicas]
        lines += ["# TYPE ssd_router_ready gauge"]
        lines += [f'ssd_router_ready{{replica="{r.name}"}} {int(r.is_ready)}' for r in self.replicas]
        lines += ["# TYPE ssd_router_prefix_requests_total counter"]
        lines += [f"ssd_router_prefix_requests_total {self._served_by_prefix}", ""]
        return "\n".join(lines)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended, however they do."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(_CHUNK):
        pass


async def _refuse(bad: BadRequestError, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say why, and read on for a moment: closing at once would reset the line before our answer is read. Whoever has
    left is told nothing."""
    writer.write(error(bad.status, str(bad)))
    with contextlib.suppress(TimeoutError, OSError):
        writer.write_eof()
        async with asyncio.timeout(_LINGER_S):
            await _read_to_end(reader)


async def _say(request: Request, whole: bytes, sink: Sink) -> None:
    """An answer of our own, of which HEAD gets the head."""
    sink.write(head_of(whole) if request.method == "HEAD" else whole)
    await sink.drain()


async def _relay(request: Request, replica: Replica, writer: Sink, *, may_refuse: bool) -> Passed:
    """Pass a request and its answer. may_refuse: a 503 is passed on to nobody, and the request was not taken."""
    client = (writer.get_extra_info("peername") or ("?",))[0]
    try:
        async with asyncio.timeout(_CONNECT_S):
            theirs, ours = await asyncio.open_connection(replica.host, replica.port)
    except (OSError, TimeoutError):
        return Passed.NOT_TAKEN
    try:
        try:
            ours.write(request.onward(str(client)))
            await ours.drain()
            data = await theirs.read(_CHUNK)
        except OSError:
            return Passed.BROKE
        if not data:
            return Passed.BROKE
        if may_refuse and data.startswith(b"HTTP/1.1 503"):
            return Passed.NOT_TAKEN
        while data:
            writer.write(data)
            await writer.drain()
            data = await theirs.read(_CHUNK)
        return Passed.ANSWERED
    finally:
        ours.close()


async def health_of(replica: Replica) -> Health:
    """What a replica says. Raises OSError or ValueError when it says nothing."""
    reader, writer = await asyncio.open_connection(replica.host, replica.port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    told = json.loads(body)
    if not isinstance(told, dict):
        raise ValueError("its health is no object")
    ready = head.startswith(b"HTTP/1.1 200")
    status = str(told.get("status"))
    return Health(ready, status, str(told.get("reason") or ("" if ready else status)))
