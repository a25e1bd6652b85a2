"""The server on the emulated NPU as users start it: the embedded model with its head, ssd, captured graphs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 400.0
FLAGS = ("--model", "smollm2-135m-eagle3", "--speculator", "ssd", "--lookahead", "3", "--max-num-seqs", "1",
         "--max-model-len", "256", "--max-batched-tokens", "256")  # fmt: skip


def health(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as starting:
        found = json.load(starting)
    except OSError:
        found = {"status": "unreachable"}
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its address, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    environment = {**os.environ, "SSD_DEVICE": "npu", "SSD_NPU_EMULATOR": "1", "SSD_LOG_LEVEL": "INFO"}
    command = [sys.executable, "-m", "ssd_ascend.serve", "--port", str(port), *FLAGS]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
    try:
        while health(url)["status"] != "ready":
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)
        yield url, log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def test_the_openai_client_is_answered(server: tuple[str, Path]) -> None:
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S)
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, max_tokens=12, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    details = answer.usage.completion_tokens_details if answer.usage else None
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as found:
        lines = dict(line.rsplit(" ", 1) for line in found.read().decode().splitlines() if line[:1] not in ("", "#"))
    assert float(lines["ssd_speculation_cache_hits_total"]) > 0


def test_it_says_everywhere_that_it_is_emulated(server: tuple[str, Path]) -> None:
    url, log = server
    assert health(url)["device"].endswith("(emulated)")
    said = log.read_text()
    assert "captured" in said
    assert "sizes run eagerly" in said
    ready = next(line for line in said.splitlines() if line.startswith("ready: "))
    assert "(emulated)" in ready
