"""The server on the emulated NPU as users start it: the embedded model with its head, ssd, captured graphs."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.serve import live
from tests.serve.live import LiveServer

PATIENCE_S = 400.0
FLAGS = ("--model", "smollm2-135m-eagle3", "--speculator", "ssd", "--lookahead", "3", "--max-num-seqs", "1",
         "--max-model-len", "256", "--max-batched-tokens", "256")  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """On a port from the system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "PATIENCE_S", PATIENCE_S)
        for name, value in {"SSD_DEVICE": "npu", "SSD_NPU_EMULATOR": "1", "SSD_LOG_LEVEL": "INFO"}.items():
            patch.setenv(name, value)
        with LiveServer(*FLAGS, module="ssd_ascend.serve") as server:
            yield server.wait_until_ready()


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as found:
        text: str = found.read().decode()
    return text


def test_the_openai_client_is_answered(server: LiveServer) -> None:
    """With drafts that stand, sooner or later: a target goes on without a worker that a busy machine makes late."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S)
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    deadline, accepted, hits = time.monotonic() + PATIENCE_S, 0, 0.0
    while not (accepted and hits):
        assert time.monotonic() < deadline, f"{accepted} drafts accepted in the last answer, {hits} hits in all"
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=messages, max_tokens=12, temperature=0
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        details = answer.usage.completion_tokens_details if answer.usage else None
        assert details is not None
        accepted = details.accepted_prediction_tokens or 0
        metrics = read(f"{server.url}/metrics").splitlines()
        lines = dict(line.rsplit(" ", 1) for line in metrics if line[:1] not in ("", "#"))
        hits = float(lines["ssd_speculation_cache_hits_total"])


def test_it_says_everywhere_that_it_is_emulated(server: LiveServer) -> None:
    assert json.loads(read(f"{server.url}/health"))["device"].endswith("(emulated)")
    said = "".join(server.errors)
    assert "captured" in said
    assert "sizes run eagerly" in said
    ready = next(line for line in server.lines if line.startswith("ready: "))
    assert "(emulated)" in ready
