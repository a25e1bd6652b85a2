"""Runs the app and the engine process together, from binding the port to the last drained request. `__main__` calls it.

The port is bound first and answers at once (503 while the model loads). When the engine dies, or is stuck and killed,
streams that had begun get an error, `/health` turns 503, and another engine is started, which also gets the requests
that had not begun. After too many losses the server exits with status 1: something is wrong that another engine would
not mend. When its first engine does not start, it exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Sequence

from ssd_ascend import catalogue
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.engine.async_engine import AsyncEngine, State
from ssd_ascend.engine.process_link import ENGINE_COMMAND
from ssd_ascend.errors import WorkerError
from ssd_ascend.log import adopt, fields, get_logger
from ssd_ascend.serve.addresses import bind, url_of
from ssd_ascend.serve.admin import create_admin_app
from ssd_ascend.serve.app import create_app
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.http_server import HttpServer, Patience
from ssd_ascend.serve.restarts import Restarts
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.traces import make_provider
from ssd_ascend.text import Tokenizer

_RESTART_PAUSE_S = 0.5
"""Before every new engine: the device may still be busy with letting go of the one before it."""
_LAST_WORDS_S = 1.0
"""How long clients have, after a second signal or at the end of a drain, to be told that their answer ends."""

log = get_logger(__name__)


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
    with contextlib.ExitStack() as sockets:
        sock = sockets.enter_context(bind(serving.host, serving.port))
        admin = None
        if serving.admin_port is not None:
            admin = sockets.enter_context(bind(serving.admin_host, serving.admin_port, flag="--admin-port"))
        step_timeout_s = math.inf if serving.step_timeout_s == 0 else serving.step_timeout_s
        engine = await AsyncEngine.start(config, tokenizer, command=engine_command, step_timeout_s=step_timeout_s)
        engine.keeps_unstarted = serving.max_restarts > 0
        try:
            await _Server(engine, tokenizer, serving, sock, admin, announce).run()
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
        admin: socket.socket | None,
        announce: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._serving = serving
        self._socket = sock
        self._admin_socket = admin
        self._announce = announce
        self._restarts = Restarts(serving.max_restarts)
        name = serving.model_name or engine.config.served_model_name or engine.config.model
        self._state = ServerState(engine, tokenizer, name, serving)
        endpoint = serving.otlp_endpoint
        self._traces = None if endpoint is None else make_provider(endpoint, model=name)
        apps = [create_app(self._state, self._traces), *([create_admin_app(self._state)] if admin is not None else ())]
        patience = Patience(
            head_s=serving.read_timeout_s, unread_s=serving.write_timeout_s, stop_s=serving.drain_s + _LAST_WORDS_S
        )
        self._http = [HttpServer(app, patience=patience, refused=self._refused) for app in apps]
        self._stop = asyncio.Event()
        adopt("uvicorn.error", "asyncio", level=logging.ERROR)

    def _refused(self, status: int, client: str, reason: str) -> None:
        """What never became a request, or a client that does not read its answer (status 0)."""
        if status:
            self._state.metrics.requests.labels("other", str(status)).inc()
        level = logging.INFO if self._serving.has_access_log else logging.DEBUG
        log.log(level, "refused %s", fields(status=status, client=client, reason=reason))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        sockets = [sock for sock in (self._socket, self._admin_socket) if sock is not None]
        serving = asyncio.gather(*(http.serve(sockets=[sock]) for http, sock in zip(self._http, sockets, strict=True)))
        stopped = asyncio.create_task(self._stop.wait())
        living = asyncio.create_task(self._live())
        try:
            done, _ = await asyncio.wait((stopped, living, serving), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what it raised
        finally:
            living.cancel()
            stopped.cancel()
            for http in self._http:
                http.should_exit = True
            self._engine.stop_accepting()
            loop.call_later(self._serving.drain_s + _LAST_WORDS_S, self._hang_up)
            await asyncio.gather(self._engine.drain(self._serving.drain_s), serving)
            await self._state.grammars.close()
            if self._traces is not None:
                await asyncio.to_thread(self._traces.shutdown)  # sends what it still holds

    def _on_signal(self) -> None:
        """The first one drains; whoever sends a second does not want to wait."""
        if self._stop.is_set():
            self._engine.end_all()
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._hang_up)
        self._stop.set()

    def _hang_up(self) -> None:
        """Wait for nobody any more, not even for a client that does not read."""
        for http in self._http:
            http.hang_up()

    async def _live(self) -> None:
        """Announce every engine that is ready, and return when the server is stopping. Raises WorkerError when the
        first one could not start, or too many were lost."""
        name = self._state.model_name
        await self._engine.wait_until_loading()
        if self._engine.state is not State.FAILED:
            self._announce(f"loading {name}; {self._url}/health says when it is ready")
            if self._admin_socket is not None:
                self._announce(f"admin endpoint on {url_of(*self._admin_socket.getsockname()[:2])}")
        await self._engine.wait_until_started()
        while True:
            info = self._engine.info
            assert info is not None
            how = "without speculation" if info.speculator == "none" else f"{info.speculator}, K={info.lookahead}"
            self._announce(f"ready: {name} on {self._url} ({info.device}, {info.dtype}, {how})")
            await self._engine.wait_for_change(State.READY)
            while self._engine.state is State.FAILED:
                await self._replace_engine()
            if self._engine.state is State.STOPPING:
                return

    async def _replace_engine(self) -> None:
        """Start another engine in place of the one that was lost, and see whether it is ready, or lost as well. Raises
        WorkerError when too many were, some time later, so that probes and clients have seen it."""
        if not self._restarts.may_follow(was_ready=self._engine.limits is not None):
            self._engine.fail_all()
            await asyncio.sleep(self._serving.failure_grace_s)
            raise WorkerError(self._engine.failure or "the engine failed", remedy=str(self._restarts))
        await asyncio.sleep(_RESTART_PAUSE_S)
        log.warning("starting another engine; %s", self._restarts)
        await self._engine.restart()
        await self._engine.wait_for_change(State.STARTING)
        if self._engine.state is State.FAILED:
            log.error("the engine did not start again: %s", self._engine.failure)

    @property
    def _url(self) -> str:
        return url_of(*self._socket.getsockname()[:2])
