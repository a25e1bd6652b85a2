"""`serve --topology laptop-cpu --preset P`: two replicas with a speculator each, one command, the official client."""

from __future__ import annotations

import os
import re
import signal
import time
import tomllib
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletion

from ssd_ascend import catalogue
from tests.serve.live import LiveServer

LONG = "Remember this: " + "one two three four five six seven eight nine ten. " * 12


def pair_preset(directory: Path) -> Path:
    """The embedded model as its own draft, for a plan needs a draft to have speculators."""
    text = catalogue.preset_path("smollm2-135m").read_text("utf-8")
    target = text[text.index("[target]") :]
    draft = target.replace("[target", "[draft")
    expected = 'value = 0.9, source = "a guess", confidence = "estimate"'
    more = f"""
[speculation]
speculator = "ssd"
drafter = "model"
lookahead = 2
fan_out = 1

[expected]
acceptance = {{ {expected} }}
hit_rate = {{ {expected} }}
hit_rate_sampled = {{ {expected} }}
"""
    path = directory / "smollm2-pair.toml"
    path.write_text(f'description = "a pair for a test"\n{target}\n{draft}\n{more}', "utf-8")
    tomllib.loads(path.read_text("utf-8"))
    return path


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


@pytest.mark.slow
def test_a_plan_of_a_laptop_serves_and_heals(tmp_path: Path) -> None:
    flags = ["--topology", "laptop-cpu", "--preset", str(pair_preset(tmp_path)), "--replicas", "2"]
    flags += ["--speculator", "ssd", "--speculators-per-replica", "1", "--context", "256"]
    flags += ["--max-model-len", "512", "--kv-cache-gb", "0.05"]
    with LiveServer(*flags, module="ssd_ascend.serve") as server:
        eventually_ready(server)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120.0)
        name = client.models.list().data[0].id

        def ask(i: int) -> ChatCompletion:
            return client.chat.completions.create(
                model=name,
                messages=[{"role": "system", "content": LONG}, {"role": "user", "content": f"Count to {i}."}],
                max_tokens=12,
                temperature=0,
            )

        first, second = ask(1), ask(2)
        assert first.choices[0].message.content
        details = second.usage.prompt_tokens_details if second.usage else None
        assert details is not None
        assert (details.cached_tokens or 0) > 100  # the same replica, by its beginning
        for child in children(server.process.pid):
            if b"ssd_ascend.speculate" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)
        assert ask(1).choices[0].message.content == first.choices[0].message.content
        replica = next(
            child
            for child in children(server.process.pid)
            if b"ssd_ascend.serve" in Path(f"/proc/{child}/cmdline").read_bytes()
        )
        os.kill(replica, signal.SIGKILL)
        assert ask(1).choices[0].message.content == first.choices[0].message.content
        deadline = time.monotonic() + 300.0
        while server.get("/health").json()["status"] != "ready":
            assert time.monotonic() < deadline, "the killed replica is not back"
            time.sleep(0.5)
        assert server.stop() == 0


def eventually_ready(server: LiveServer) -> None:
    """A launcher takes longer than one server: four processes load a model on these cores."""
    deadline = time.monotonic() + 300.0
    while not any(line.startswith("ready: ") for line in server.lines):
        assert server.process.poll() is None, server.errors
        assert time.monotonic() < deadline, server.lines
        time.sleep(0.2)
    found = re.search(r"http://\S+", server.lines[-1])
    assert found is not None
    server.url = found[0]
