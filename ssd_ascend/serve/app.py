"""The HTTP application: routes, the key, health, and the OpenAPI description. `server.py` runs it.

Bodies are parsed by our own models instead of the framework's, so that every error has OpenAI's shape and a body is
checked once, from bytes.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.engine.async_engine import State
from ssd_ascend.serve.access import AccessLog
from ssd_ascend.serve.chat import chat_completions
from ssd_ascend.serve.completions import completions
from ssd_ascend.serve.encoding import json_response
from ssd_ascend.serve.errors import ApiError, install_error_handlers
from ssd_ascend.serve.head import HeadAsGet
from ssd_ascend.serve.origins import OwnPagesOnly
from ssd_ascend.serve.page import page_routes
from ssd_ascend.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ssd_ascend.serve.responses.endpoint import responses
from ssd_ascend.serve.responses.request import ResponsesRequest
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.strict import Strict
from ssd_ascend.serve.tokenization import detokenize, tokenize
from ssd_ascend.serve.traces import RequestTraces

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Handler = Callable[[ServerState, Request], Awaitable[Response]]

POSTS: dict[str, tuple[Handler, type[Strict]]] = {
    "/v1/chat/completions": (chat_completions, ChatRequest),
    "/v1/completions": (completions, CompletionRequest),
    "/v1/responses": (responses, ResponsesRequest),
    "/tokenize": (tokenize, TokenizeRequest),
    "/detokenize": (detokenize, DetokenizeRequest),
}


def create_app(state: ServerState, traces: TracerProvider | None = None) -> FastAPI:
    """The application around one engine; with `traces`, every request has a span."""
    app = FastAPI(title="ssd_ascend", description="OpenAI-compatible server", redoc_url=None, docs_url=None)
    app.state.server = state
    install_error_handlers(app)
    app.include_router(_protected_routes(state))
    app.include_router(_open_routes(state))
    if state.config.has_page:
        app.include_router(page_routes())
    app.add_middleware(HeadAsGet)  # the innermost: who is added later sees a request before
    app.add_middleware(OwnPagesOnly, named=state.config.cors_origins)
    if state.config.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=state.config.cors_origins, **_CORS)
    known = frozenset({*POSTS, "/", "/v1/models", "/health", "/metrics"})
    if traces is not None:
        app.add_middleware(RequestTraces, provider=traces, is_known=lambda path: path in POSTS)
    app.add_middleware(AccessLog, metrics=state.metrics, known=known, is_loud=state.config.has_access_log)
    _describe_bodies(app)
    return app


def _protected_routes(state: ServerState) -> APIRouter:
    """What needs a key, if there are any, and counts against its rate limit."""
    router = APIRouter(dependencies=[Depends(_gate(state))])
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
        return json_response({"object": "list", "data": [_model(state)]})

    @router.get("/v1/models/{name:path}", response_class=Response, summary="The same, by name.")
    async def model(name: str) -> Response:
        state.check_model(name)
        return json_response(_model(state))

    return router


def _open_routes(state: ServerState) -> APIRouter:
    """What probes and scrapers read, without a key."""
    router = APIRouter()

    @router.get("/health", response_class=Response, summary="starting, ready, degraded, stopping or failed.")
    async def health() -> Response:
        status, body = health_of(state)
        return json_response(body, status=status)

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
            if engine.failure is not None:  # of the one before it
                body["reason"] = engine.failure
        case State.FAILED:
            body["reason"] = engine.failure
        case State.READY:
            if engine.degraded is not None:
                body |= {"status": "degraded", "reason": engine.degraded}
            body |= {"running": engine.stats.running, "waiting": engine.stats.waiting}
            if engine.info is not None:  # which says so where the device is emulated
                body["device"] = engine.info.device
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
        response = await handler(state, request)
        response.headers.update(getattr(request.state, "rate_headers", {}))
        return response

    return handle


def _gate(state: ServerState) -> Callable[[Request], Awaitable[None]]:
    """Checks the key and the rate limit, and leaves the headers that tell how much of it is left."""
    check = key_check(state.config.api_keys)

    async def pass_through(request: Request) -> None:
        key = check(request)
        if state.rate is not None:
            client = key or (request.client.host if request.client else "")
            request.state.rate_headers = state.rate.take(client)

    return pass_through


def key_check(keys: Sequence[str]) -> Callable[[Request], str | None]:
    """Gives the key that a request brings, None where none is needed. Raises ApiError 401 for a wrong one."""
    expected = [key.encode() for key in keys]

    def check(request: Request) -> str | None:
        if not expected:
            return None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # every key is compared in full, whichever fits: the time it takes tells nothing
        fits = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in expected]
        if kind.lower() != "bearer" or not any(fits):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        return keys[fits.index(True)]

    return check


_CORS: dict[str, Any] = {
    "allow_methods": ["GET", "HEAD", "POST"],
    "allow_headers": ["authorization", "content-type", "x-request-id"],
    "expose_headers": ["x-request-id"],
}


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
