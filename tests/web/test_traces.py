"""Spans reach a collector: one that keeps what it gets, in place of a real one."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.serve.conftest import parrot_directory
from tests.serve.live import LiveServer

pytestmark = pytest.mark.slow


def test_spans_are_sent_below_the_callers(tmp_path: Path) -> None:
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    with LiveServer("--model", str(parrot_directory(tmp_path / "parrot")), "--otlp-endpoint", endpoint) as live:
        live.wait_until_ready()
        parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        assert live.post("/v1/completions", {"prompt": "hi", "max_tokens": 5}, headers=parent).status_code == 200
        assert live.post("/v1/completions", {"prompt": 3}).status_code == 400
        assert live.stop() == 0  # and what was not sent yet is sent
    collector.shutdown()
    collector.server_close()
    spans = []
    for body in received:
        message = proto.ExportTraceServiceRequest()
        message.ParseFromString(body)
        spans += [span for group in message.resource_spans for scope in group.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["POST /v1/completions"] * 2
    found = {entry.key: entry.value.int_value for entry in spans[0].attributes}
    assert found["http.response.status_code"] == 200
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (2, 5)
    assert found["ssd.accepted_tokens"] == 3
    assert spans[0].trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert spans[0].parent_span_id.hex() == "b7ad6b7169203331"
    assert {entry.key: entry.value.int_value for entry in spans[1].attributes} == {"http.response.status_code": 400}
