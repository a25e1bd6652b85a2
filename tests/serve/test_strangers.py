"""What strangers do to an open port: no HTTP, half of it, answers that nobody reads, floods. Others notice nothing."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError

from ssd_ascend.serve.protocol import ChatRequest, CompletionRequest
from tests.serve.fake_engine import MAX_MODEL_LEN
from tests.serve.live import PATIENCE_S, LiveServer, eventually
from tests.serve.odd_requests import ALLOWED, REFUSED, chunked

COMPLETIONS = "/v1/completions"
HI: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def live(parrot: Path) -> Iterator[LiveServer]:
    """A server with little patience, which logs every request as JSON."""
    flags = ["--read-timeout", "2", "--write-timeout", "0.5", "--access-log", "--log-format", "json"]
    with LiveServer("--model", str(parrot), *flags) as server:
        yield server.wait_until_ready()
        server.wait_until_idle()
        assert server.stop() == 0
        for line in server.errors:
            json.loads(line)  # whatever happened, every line of the log is an object


@pytest.fixture(autouse=True)
def _next_request_works(live: LiveServer) -> Iterator[None]:
    yield
    assert live.post(COMPLETIONS, HI).json()["choices"][0]["text"] == "hihi"


def connect(live: LiveServer) -> socket.socket:
    address = urlsplit(live.url)
    return socket.create_connection((str(address.hostname), address.port), timeout=PATIENCE_S)


def answer_to(live: LiveServer, sent: bytes) -> bytes:
    """All that comes until the server hangs up, which it must."""
    with connect(live) as sock:
        sock.sendall(sent)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def post_of(body: dict[str, Any], *headers: bytes) -> bytes:
    content = json.dumps(body).encode()
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        *REFUSED.values(),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60) + b"\r\n\r\n", 400),
        (chunked(b"zz\r\n"), 400),
        (b"GET /hea", 408),
    ],
    ids=[*REFUSED, "tls", "no chunk", "half a head"],
)
def test_what_is_no_request_ends_its_connection(live: LiveServer, sent: bytes, status: int) -> None:
    """Whatever stands behind it is not read as another request."""
    said = answer_to(live, sent + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * (status != 408))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("asks", [b"Expect: 100-continue", b"Connection: keep-alive"])
def test_a_client_of_http_1_0_gets_a_stream_without_chunks(live: LiveServer, asks: bytes) -> None:
    """It knows neither chunks nor interim answers (RFC 9112, section 7.1; RFC 9110, section 10.1.1)."""
    said = answer_to(live, post_of({**HI, "stream": True}, asks).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"chunked" not in head
    assert b"connection: close" in head
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "hihi"


def test_a_whole_answer_has_its_length_in_http_1_0_too(live: LiveServer) -> None:
    head, _, body = answer_to(live, post_of(HI).replace(b"HTTP/1.1", b"HTTP/1.0", 1)).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head
    assert json.loads(body)["choices"][0]["text"] == "hihi"


@pytest.mark.parametrize("sent", ALLOWED.values(), ids=ALLOWED)
def test_what_is_clear_is_answered_and_what_follows_too(live: LiveServer, sent: bytes) -> None:
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    expected = 400 if b"POST" in sent else 200
    said = answer_to(live, sent + last)
    assert [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", said)] == [expected, 200]


def test_a_trailer_is_no_header(parrot: Path) -> None:
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with LiveServer("--model", str(parrot), "--api-key", "secret") as own:
        own.wait_until_ready()
        said = answer_to(own, chunked(b"0\r\nAuthorization: Bearer secret\r\n\r\n") + last)
        assert said.startswith(b"HTTP/1.1 401 ")


def test_many_requests_in_one_packet_are_answered_in_turn(live: LiveServer) -> None:
    asked = [post_of({**HI, "prompt": str(number % 10)}) for number in range(32)]
    said = answer_to(live, b"".join(asked) + b"\x00")
    texts = [json.loads(body)["choices"][0]["text"][0] for body in re.findall(rb"\{.*\"choices\".*\}", said)]
    assert texts == [str(number % 10) for number in range(32)]
    assert b"HTTP/1.1 400 " in said.rpartition(b"choices")[2]
    said = answer_to(live, b"".join([*asked, *asked]))
    assert said.count(b'"choices"') == 32  # and no queue as long as the client likes
    assert b"wait for their turn" in said.rpartition(b"choices")[2]


def test_who_says_nothing_is_hung_up_on(live: LiveServer) -> None:
    assert answer_to(live, b"") == b""


def test_a_second_head_has_a_clock_too(live: LiveServer) -> None:
    said = answer_to(live, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in said
    with connect(live) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"GET /hea")
        assert b" 408 " in b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_garbage_behind_a_stream_harms_only_its_sender(live: LiveServer) -> None:
    said = answer_to(live, post_of({**HI, "stream": True}) + b"\x00\x00\r\n\r\n")
    assert b"data: [DONE]" in said
    assert b"HTTP/1.1 400 " in said


def test_a_body_cut_off_and_one_that_never_comes(live: LiveServer) -> None:
    with connect(live) as sock:
        sock.sendall(post_of(HI)[:-5])
    assert b" 408 " in answer_to(live, post_of(HI, b"Connection: close")[:-5])


def test_an_upgrade_is_declined_and_odd_bytes_pass(live: LiveServer) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert b" 200 " in answer_to(live, upgrade)
    assert b" 200 " in answer_to(live, post_of(HI, b"Authorization: Bearer \xff\xfe", b"Connection: close"))
    assert b" 404 " in answer_to(live, b"GET /%ff%00/..%2f HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")


def test_an_answer_that_nobody_reads_ends(live: LiveServer) -> None:
    """The client's buffers are small and stay full: the server gives up on it, in the engine too."""
    before = live.metric("ssd_client_disconnects_total")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(live.url)
        sock.connect((str(address.hostname), address.port))
        sock.sendall(post_of({"prompt": "x", "max_tokens": MAX_MODEL_LEN - 1, "n": 128, "stream": True}))
        eventually(lambda: live.metric("ssd_client_disconnects_total") > before, "the server gave up")
    live.wait_until_idle()


def test_two_hundred_clients_at_once(server: LiveServer) -> None:
    limits = httpx.Limits(max_connections=200)
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client,
        ThreadPoolExecutor(200) as pool,
    ):

        def ask(number: int) -> bool:
            prompt = f"<{number}>"
            found = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 30})
            return bool(found.json()["choices"][0]["text"] == (prompt * 30)[:30])

        assert all(pool.map(ask, range(200)))


def test_what_cannot_fit_is_refused_unread(server: LiveServer) -> None:
    """Megabytes would take this tokenizer a minute."""
    for body in ({"prompt": "a" * (7 << 20)}, {"prompt": ["a", "a" * (7 << 20)]}):
        refused = server.post(COMPLETIONS, body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    counted = server.post("/tokenize", {"prompt": "a" * (7 << 20)})
    assert (counted.status_code, counted.json()["error"]["param"]) == (400, "prompt")
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (7 << 20)}]})
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "messages")


def test_answers_to_one_request_are_bounded(live: LiveServer) -> None:
    refused = live.post(COMPLETIONS, {"prompt": ["x"] * 2048, "n": 128})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatRequest, {"messages": [1] * 100_000}),
        (ChatRequest, {"messages": [], "stop": [1] * 100_000}),
        (ChatRequest, {"messages": [], "tools": [{}] * 100_000}),
        (ChatRequest, {"messages": [], "logit_bias": dict.fromkeys(map(str, range(100_000)), "x")}),
        (ChatRequest, {"messages": [], **dict.fromkeys(map(str, range(100_000)), "x")}),
        (CompletionRequest, {"prompt": [[1]] * 100_000 + [["x"]]}),
    ],
)
def test_a_flood_of_mistakes_is_few_errors(schema: Any, body: dict[str, Any]) -> None:
    """Each one costs microseconds of a loop that everybody shares."""
    with pytest.raises(ValidationError) as wrong:
        schema.model_validate_json(json.dumps(body))
    assert wrong.value.error_count() < 10


def test_ctrl_c_twice_with_a_client_that_does_not_read(parrot: Path) -> None:
    with LiveServer("--model", str(parrot)) as own:
        own.wait_until_ready()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            address = urlsplit(own.url)
            sock.connect((str(address.hostname), address.port))
            sock.sendall(post_of({"prompt": "x", "max_tokens": MAX_MODEL_LEN - 1, "n": 64, "stream": True}))
            own.wait_until_idle()  # it is all said, and stuck
            started = time.monotonic()
            own.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            own.process.send_signal(signal.SIGINT)
            assert own.wait() == 0
            assert time.monotonic() - started < 20  # and not the thirty seconds of a drain
        assert own.errors == []


@pytest.mark.parametrize("where", ["full", "gone"])
def test_standard_output_that_takes_nothing(parrot: Path, where: str) -> None:
    """`serve > /full/disk` and `serve | head -1` go on serving."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reader, writer = os.pipe()
    os.close(reader)
    output = os.open("/dev/full", os.O_WRONLY) if where == "full" else writer
    command = [sys.executable, "-m", "tests.serve.fake_server", "--port", str(port), "--model", str(parrot)]
    with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        os.close(writer)
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: is_ready(url), "it is ready")
        assert httpx.post(url + COMPLETIONS, json=HI, timeout=PATIENCE_S).json()["choices"][0]["text"] == "hihi"
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert "cannot write to standard output" in process.stderr.read()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


def test_a_log_that_may_not_grow_comes_back_when_there_is_room(parrot: Path, tmp_path: Path) -> None:
    """The log file meets its limit in the middle of a line; requests go on, and so does the log once it was rotated."""
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "tests.serve.fake_server", "--port", "0", "--model", str(parrot), "--access-log"]
    limit = 4000
    with log.open("a") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("ready")).split(" on ")[1].split(" ")[0]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            for _ in range(60):
                assert client.post(COMPLETIONS, json=HI).json()["choices"][0]["text"] == "hihi"
            assert log.stat().st_size == limit
            os.truncate(log, 0)
            client.post(COMPLETIONS, json=HI, headers={"x-request-id": "after"})
            eventually(lambda: "request_id=after" in log.read_text(), "the log goes on")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
