"""Runs the app and the engine process together, from binding the port to the last drained request. `__main__` calls it.

The port is bound first and answers at once (503 while the model loads). When the engine dies, open streams get an
error, `/health` turns 503, and after a moment for probes to see it the server exits with status 1: restarting it is a
supervisor's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from ssd_ascend import catalogue
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.engine.async_engine import ENGINE_COMMAND, AsyncEngine, State
from ssd_ascend.errors import ConfigError, WorkerError
from ssd_ascend.serve.app import create_app
from ssd_ascend.serve.state import ServerState
from ssd_ascend.text import Tokenizer

_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve. `drain_s` bounds how long requests may go on after SIGTERM, `failure_grace_s` how long a server
    whose engine died still answers 503."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    tool_format: str = "auto"
    model_name: str | None = None
    drain_s: float = 30.0
    failure_grace_s: float = 2.0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken by another program", remedy="choose another with --port, or 0 for any"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


async def run_server(
    config: EngineConfig,
    serving: ServerConfig,
    *,
    announce: Callable[[str], None],
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> None:
    """Serve until told to stop, and drain. `announce` is told where we listen, and when we are ready.

    Raises ConfigError when the port or the model cannot be had, WorkerError when the engine fails, at start or later.
    """
    tokenizer = Tokenizer.load(catalogue.resolve_model(config.model), chat_template=config.chat_template)
    with bind(serving.host, serving.port) as sock:
        engine = await AsyncEngine.start(config, tokenizer, command=engine_command)
        try:
            await _Server(engine, tokenizer, serving, sock, announce).run()
        finally:
            await engine.close()


class _Server:
    """One run: three things may end it, a signal, the engine's death, and a failed start."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        serving: ServerConfig,
        sock: socket.socket,
        announce: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._serving = serving
        self._socket = sock
        self._announce = announce
        name = serving.model_name or engine.config.served_model_name or engine.config.model
        self._state = ServerState(engine, tokenizer, name, serving.api_key, serving.tool_format)
        self._http = _Http(
            uvicorn.Config(
                create_app(self._state),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=round(serving.drain_s) + 5,
            )
        )
        self._stop = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        stopped = asyncio.create_task(self._stop.wait())
        living = asyncio.create_task(self._live())
        try:
            done, _ = await asyncio.wait((stopped, living, serving), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what it raised
        finally:
            living.cancel()
            stopped.cancel()
            self._http.should_exit = True
            self._engine.stop_accepting()
            await asyncio.gather(self._engine.drain(self._serving.drain_s), serving)

    def _on_signal(self) -> None:
        """The first one drains; whoever sends a second does not want to wait."""
        if self._stop.is_set():
            self._engine.end_all()
        self._stop.set()

    async def _live(self) -> None:
        """Announce the engine when it is ready, and return when the server is stopping. Raises WorkerError when the
        engine could not start, or, some time after it died, so that probes and clients have seen it."""
        name = self._state.model_name
        self._announce(f"loading {name}; {self._url}/health says when it is ready")
        await self._engine.wait_until_started()
        info = self._engine.info
        assert info is not None
        how = "without speculation" if info.speculator == "none" else f"{info.speculator}, K={info.lookahead}"
        self._announce(f"ready: {name} on {self._url} ({info.device}, {info.dtype}, {how})")
        await self._engine.wait_for_change(State.READY)
        if self._engine.state is State.FAILED:
            await asyncio.sleep(self._serving.failure_grace_s)
            raise WorkerError(self._engine.failure or "the engine failed")

    @property
    def _url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Http(uvicorn.Server):
    """uvicorn without its signal handling: it would end the process by the signal, and we promise status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
