"""The router as a Ray Serve application: `serve --topology T --preset P --ray ADDRESS --ray-serve`.

Serve keeps it alive and opens its port on every node of the cluster; which replica gets a request is `routing.py`'s
choice, as without it, and answers come from the replicas straight to it. Needs the extra `ray`. `launch.py` calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final
from urllib.parse import quote

from ssd_ascend.errors import ConfigError
from ssd_ascend.serve.bodies import read_body
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.errors import ApiError, error_response
from ssd_ascend.serve.http_wire import Request, read_answer
from ssd_ascend.serve.router import Router, health_of
from ssd_ascend.serve.routing import Replica

_NAME: Final = "ssd_ascend"
_EVERY_S: Final = 0.5


class Pipe:
    """Where the router writes an answer, for somebody in the same process who reads it as it comes."""

    def __init__(self, client: str) -> None:
        self.reader = asyncio.StreamReader()
        self._client = client

    def write(self, data: bytes) -> None:
        """More of the answer."""
        self.reader.feed_data(data)

    async def drain(self) -> None:
        """An answer is small beside the time that it takes; nothing is held back."""

    def get_extra_info(self, name: str) -> Any:
        """Whose request it is, under "peername"."""
        return (self._client, 0) if name == "peername" else None


class Front:
    """The deployment. Serve makes it and calls it with Starlette requests, in one asyncio loop."""

    def __init__(self, replicas: Sequence[tuple[str, str, int]], max_body_bytes: int, read_timeout_s: float) -> None:
        """replicas: name, host and port of each. The rest is as in `ServerConfig`, whose keys need not travel."""
        self._router = Router([Replica(*each) for each in replicas])
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s = read_timeout_s

    async def __call__(self, request: Any) -> Any:
        """Pass a request on; the answer streams as it comes. It ends with the client, whose leaving Serve tells."""
        self._router.watch()
        try:
            body = await read_body(request, max_bytes=self._max_body_bytes, timeout_s=self._read_timeout_s)
        except ApiError as refusal:
            return error_response(refusal.status, str(refusal))
        asked = Request(request.method, _target(request.scope), tuple(request.headers.raw), body)
        pipe = Pipe(request.client.host if request.client else "?")
        passing = asyncio.create_task(self._router.handle(asked, pipe))
        passing.add_done_callback(lambda _: pipe.reader.feed_eof())
        try:
            answer = await read_answer(pipe.reader)
        except BaseException:  # the client has left, or the answer broke before its head was there
            passing.cancel()
            raise
        made = import_module("starlette.responses").StreamingResponse(
            _until_left(answer.body, passing), status_code=answer.status
        )
        made.raw_headers = list(answer.headers)
        return made

    async def close(self) -> None:
        """Watch no longer."""
        await self._router.close(0.0)


def _target(scope: Mapping[str, Any]) -> str:
    """What a request asks for as its client wrote it, escapes and all: taken out of them, it might be no path."""
    path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def _until_left(body: AsyncIterator[bytes], passing: asyncio.Task[None]) -> AsyncIterator[bytes]:
    """The body; whoever stops reading it ends the request at the replica, too."""
    try:
        async for data in body:
            yield data
    finally:
        passing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await passing


class ServeFront:
    """The application, as the launcher holds it: see `launch.AnyFront`."""

    def __init__(self, replicas: Sequence[Replica], limits: ServerConfig) -> None:
        self._limits = limits.max_body_bytes, limits.read_timeout_s
        self._replicas = [(each.name, each.host, each.port) for each in replicas]
        try:
            self._serve = import_module("ray.serve")
        except ImportError as error:
            raise ConfigError(
                f"--ray-serve needs what Ray Serve needs: {error}", remedy="pip install 'ssd-ascend[ray]'"
            ) from error
        self._here: Replica | None = None

    async def start(self, host: str, port: int) -> int:
        """Deploy; returns the port, on every node. ConfigError for a port of the system's choice."""
        if port == 0:
            raise ConfigError("--port is 0: Ray Serve opens one port on every node", remedy="give --port a number")
        self._here = Replica("front", "127.0.0.1" if host == "0.0.0.0" else host, port)
        await asyncio.to_thread(self._deploy, host, port)
        return port

    def _deploy(self, host: str, port: int) -> None:
        self._serve.start(http_options={"host": host, "port": port, "location": "EveryNode"})
        deployment = self._serve.deployment(
            Front, name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100_000
        )
        self._serve.run(deployment.bind(self._replicas, *self._limits), name=_NAME, route_prefix="/")

    async def wait_until_ready(self) -> None:
        """Return once every replica is ready, as the application says."""
        assert self._here is not None
        while True:
            with contextlib.suppress(OSError, ValueError):
                if (await health_of(self._here)).status == "ready":
                    return
            await asyncio.sleep(_EVERY_S)

    async def close(self, drain_s: float) -> None:
        """Take the application down; Serve gives what is under way its own time."""
        await asyncio.to_thread(self._serve.shutdown)
