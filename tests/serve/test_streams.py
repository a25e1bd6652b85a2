"""Many streams at once: clients that leave, clients that share, and what the metrics say afterwards."""

from __future__ import annotations

import asyncio
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from ssd_ascend.engine.answer_stream import AnswerStream
from ssd_ascend.engine.answers import Answer, AnswerDelta, AnswerStats
from ssd_ascend.errors import RequestError
from ssd_ascend.serve import streaming
from ssd_ascend.serve.streaming import AnswerResponse
from tests.serve.live import PATIENCE_S, LiveServer, eventually


def open_stream(server: LiveServer, prompt: str, max_tokens: int) -> http.client.HTTPConnection:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PATIENCE_S)
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection


def test_200_dropped_streams_leave_nothing(server: LiveServer) -> None:
    """B30: some leave after a chunk, some while they wait for their turn, some whole (not streamed)."""
    for batch in range(10):
        connections = [open_stream(server, f"SLOW {batch} {i} ", 480) for i in range(20)]
        connections[0].getresponse().readline()
        for connection in connections:
            connection.close()
    server.wait_until_idle()
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 4}).json()["choices"][0]["text"] == "hihi"


def test_a_dropped_request_that_was_not_streamed_is_aborted(server: LiveServer) -> None:
    before = server.metric("ssd_client_disconnects_total")
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "SLOW one ", "max_tokens": 480}))
    eventually(lambda: server.metric("ssd_requests_running") > 0, "it runs")
    connection.close()
    eventually(lambda: server.metric("ssd_client_disconnects_total") > before, "the server noticed")
    server.wait_until_idle()


def test_32_streams_at_once_all_whole(server: LiveServer) -> None:
    def ask(number: int) -> tuple[str, Any]:
        events = list(server.events("/v1/completions", {"prompt": f"<{number}>", "max_tokens": 120}))
        assert events[-1] == "[DONE]"
        texts = [event["choices"][0]["text"] for event in events[:-1]]
        return "".join(texts), events[-2]["choices"][0]["finish_reason"]

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    for number, (text, reason) in enumerate(answers):
        said = f"<{number}>"
        assert text == (said * 120)[:120]
        assert reason == "length"


def test_metrics_count_what_clients_saw(server: LiveServer) -> None:
    """B06: tokens counted are tokens kept, here 3 of a run of 4; the engine may have been a step ahead of the abort."""
    server.wait_until_idle()
    names = (
        "ssd_generation_tokens_total",
        "ssd_prompt_tokens_total",
        "ssd_drafted_tokens_total",
        "ssd_speculation_cache_lookups_total",
        "ssd_time_to_first_token_seconds_count",
        "ssd_inter_token_seconds_count",
    )
    before = [server.metric(name) for name in names]
    usage = server.post("/v1/completions", {"prompt": "xSLOW", "max_tokens": 50, "stop": "L"}).json()["usage"]
    eventually(lambda: server.metric(names[3]) > before[3], "the engine's counters arrive")
    server.wait_until_idle()
    after = [server.metric(name) for name in names]
    tokens, prompts, drafted, lookups, first, others = (now - then for now, then in zip(after, before, strict=True))
    assert (tokens, prompts, first, others) == (usage["completion_tokens"], 5, 1, 2) == (3, 5, 1, 2)
    assert drafted == 3 * lookups > 0
    page = server.get("/metrics").text
    for name in (
        'ssd_accepted_tokens_per_position_total{position="0"}',
        'ssd_answers_total{finish_reason="stop"}',
        'ssd_requests_total{path="/v1/completions",status="200"}',
        "ssd_accepted_length_on_hit",
        "ssd_accepted_length_on_miss",
        "ssd_draft_idle_seconds_total",
        "ssd_target_wait_seconds_total",
        "ssd_kv_usage_ratio",
    ):
        assert f"\n{name}" in page


class Bare:
    """Writes no more of an answer than that there is one."""

    def opening(self) -> bytes:
        return b"opening\n"

    def event(self, delta: AnswerDelta) -> bytes:
        return b"event\n"

    def closing(self, stats: dict[int, AnswerStats]) -> bytes:
        return b"closing\n"

    def whole(self, answers: list[Answer]) -> bytes:
        return b"whole"


def error_delta(refusal: RequestError | None) -> AnswerDelta:
    return AnswerDelta(
        request_id=0, index=0, text="", token_ids=[], offsets=[], finish_reason="error", error="no", refusal=refusal
    )


async def sent(delta: AnswerDelta, *, at_once: bool) -> list[Any]:
    """What leaves for a stream that gets this delta: its status, and its body piece by piece."""
    stream, messages, head_left = AnswerStream(1, lambda stream: None), list[Any](), asyncio.Event()

    async def send(message: Any) -> None:
        messages.append(message.get("status") or message["body"])
        head_left.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    response = AnswerResponse(
        stream, Bare(), num_answers=1, streamed=True, on_disconnect=list, timeout_s=None, names={"grammar": "regex"}
    )
    if at_once:
        stream.put(delta)
    answering = asyncio.create_task(response({"type": "http"}, receive, send))
    if not at_once:
        await head_left.wait()
        stream.put(delta)
    await answering
    return messages


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "param"),
    [
        (RequestError("no", param="grammar"), 400, "invalid_request_error", "regex"),
        (None, 500, "server_error", None),
    ],
)
def test_an_error_has_a_status_until_the_stream_has_begun(
    refusal: RequestError | None, status: int, kind: str, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = error_delta(refusal)
    told, body = asyncio.run(sent(delta, at_once=True))
    assert told == status
    monkeypatch.setattr(streaming, "_HEAD_WAITS_S", 0.01)
    begun, opening, event = asyncio.run(sent(delta, at_once=False))
    assert (begun, opening, event) == (200, b"opening\n", b"data: " + body + b"\n\n")
    error = json.loads(body)["error"]
    assert (error["message"], error["type"], error["param"]) == ("no", kind, param)
