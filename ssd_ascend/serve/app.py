"""The HTTP application: routes, the key, health, and the OpenAPI description. `__main__` runs it under uvicorn.

Bodies are parsed by our own models instead of the framework's, so that every error has OpenAI's shape and a body is
checked once, from bytes.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_ascend.engine.async_engine import State
from ssd_ascend.serve.chat import chat_completions
from ssd_ascend.serve.completions import completions
from ssd_ascend.serve.errors import ApiError, install_error_handlers
from ssd_ascend.serve.metrics import ServerMetrics
from ssd_ascend.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.streaming import encode_json
from ssd_ascend.serve.strict import Strict
from ssd_ascend.serve.tokenization import detokenize, tokenize

Handler = Callable[[ServerState, Request], Awaitable[Response]]

POSTS: dict[str, tuple[Handler, type[Strict]]] = {
    "/v1/chat/completions": (chat_completions, ChatRequest),
    "/v1/completions": (completions, CompletionRequest),
    "/tokenize": (tokenize, TokenizeRequest),
    "/detokenize": (detokenize, DetokenizeRequest),
}


def create_app(state: ServerState) -> FastAPI:
    """The application around one engine."""
    app = FastAPI(title="ssd_ascend", description="OpenAI-compatible server", redoc_url=None, docs_url=None)
    app.state.server = state
    install_error_handlers(app)
    app.include_router(_protected_routes(state))
    app.include_router(_open_routes(state))
    app.add_middleware(_CountRequests, metrics=state.metrics)
    _describe_bodies(app)
    return app


def _protected_routes(state: ServerState) -> APIRouter:
    """What needs the key, if there is one."""
    router = APIRouter(dependencies=[Depends(_key_check(state.api_key))])
    for path, (handler, schema) in POSTS.items():
        router.add_api_route(
            path,
            _bound(handler, state),
            methods=["POST"],
            name=handler.__name__,
            response_class=Response,
            summary=(handler.__doc__ or "").strip(),
            openapi_extra={"requestBody": {"required": True, "content": _json_body(schema)}},
        )

    @router.get("/v1/models", response_class=Response, summary="The model served here.")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(state)]})

    @router.get("/v1/models/{name:path}", response_class=Response, summary="The same, by name.")
    async def model(name: str) -> Response:
        state.check_model(name)
        return _json(_model(state))

    return router


def _open_routes(state: ServerState) -> APIRouter:
    """What probes and scrapers read, without a key."""
    router = APIRouter()

    @router.get("/health", response_class=Response, summary="starting, ready, degraded, stopping or failed.")
    async def health() -> Response:
        status, body = health_of(state)
        return _json(body, status=status)

    @router.get("/metrics", response_class=Response, summary="Prometheus metrics.")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def health_of(state: ServerState) -> tuple[int, dict[str, object]]:
    """The status code and body of `/health`: 200 while requests are served, however slowly, else 503."""
    engine = state.engine
    body: dict[str, object] = {"status": engine.state.value, "model": state.model_name}
    match engine.state:
        case State.STARTING:
            progress = engine.progress
            body["progress"] = {"stage": progress.stage, "done": progress.done, "total": progress.total}
        case State.FAILED:
            body["reason"] = engine.failure
        case State.READY:
            if engine.degraded is not None:
                body |= {"status": "degraded", "reason": engine.degraded}
            body |= {"running": engine.stats.running, "waiting": engine.stats.waiting}
        case State.STOPPING:
            body["reason"] = "the server is shutting down"
    return (200 if engine.state is State.READY else 503), body


def _model(state: ServerState) -> dict[str, object]:
    limits = state.engine.require_ready()
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "ssd_ascend",
        "max_model_len": limits.max_model_len,
    }


def _bound(handler: Handler, state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await handler(state, request)

    return handle


def _key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    expected = None if api_key is None else api_key.encode()

    async def check(request: Request) -> None:
        if expected is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), expected):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    return check


class _CountRequests:
    """Counts responses by path and status; plain ASGI, since the framework's own middleware class slows streams."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._requests = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _COUNTED else "other"  # an attacker must not make labels

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)


_COUNTED = frozenset({*POSTS, "/v1/models", "/health", "/metrics"})


def _json(body: object, *, status: int = 200) -> Response:
    return Response(encode_json(body), status_code=status, media_type="application/json")


def _json_body(schema: type[Strict]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}


def _describe_bodies(app: FastAPI) -> None:
    """Put our models into the OpenAPI description."""
    described = app.openapi
    schemas = [schema for _, schema in POSTS.values()]

    def openapi() -> dict[str, Any]:
        document = described()
        _, definitions = models_json_schema(
            [(schema, "validation") for schema in schemas], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
