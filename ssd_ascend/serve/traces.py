"""OpenTelemetry: a span for every request, sent as OTLP over HTTP. Only with `--otlp-endpoint`, and the extra `otel`.

A caller's `traceparent` is honoured. Attributes follow the conventions for generative models where there is a name for
what we know, and begin with `ssd.` where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_ascend.errors import ConfigError
from ssd_ascend.serve.access import OUTCOME

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_NAMES = {"prompt_tokens": "gen_ai.usage.input_tokens", "completion_tokens": "gen_ai.usage.output_tokens"}


def make_provider(endpoint: str, *, model: str) -> TracerProvider:
    """What makes and sends spans; `shutdown` sends the last ones. Raises ConfigError without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint needs the package {error.name!r}", remedy="pip install 'ssd-ascend[otel]'"
        ) from error
    resource = Resource.create({"service.name": "ssd_ascend", "gen_ai.request.model": model})
    provider = TracerProvider(resource=resource)
    url = endpoint.rstrip("/")
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces"))
    )
    return provider


class RequestTraces:
    """Wraps the app; plain ASGI, so that streams stay streams."""

    def __init__(self, app: ASGIApp, *, provider: TracerProvider, is_known: Callable[[str], bool]) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = provider.get_tracer("ssd_ascend.serve")
        self._extract = TraceContextTextMapPropagator().extract
        self._kind = SpanKind.SERVER
        self._is_known = is_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_known(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(name, self._extract(headers), self._kind) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await self._app(scope, receive, noting)
            finally:
                outcome: dict[str, Any] = scope.get(OUTCOME, {})
                span.set_attributes({_NAMES.get(key, f"ssd.{key}"): value for key, value in outcome.items()})
