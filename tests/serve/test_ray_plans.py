"""Whole plans on Ray with the real model: replicas with speculators, a target over three nodes, Ray Serve in front.

One machine is a cluster of several nodes here, each with a few of its cores. Wherever `ray` is installed.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from ssd_ascend import LLM, SamplingParams
from tests.serve.live import LiveServer

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
TOKENS = 16
LAPTOP = Path(__file__).parents[2] / "topology" / "laptop-cpu.toml"


@pytest.fixture(scope="module")
def expected() -> str:
    """What one process answers in plain decoding."""
    llm = LLM(model="smollm2-135m", dtype="float32")
    try:
        text: str = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=TOKENS))[0].answers[0].text
        return text
    finally:
        llm.close()


@contextmanager
def cluster(*cpus: int) -> Iterator[str]:
    """The address of a Ray cluster with a node for each number of CPUs; this process is connected to it."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
    try:
        for count in cpus[1:]:
            nodes.add_node(num_cpus=count)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()


@contextmanager
def serving(*flags: str, port: str = "0") -> Iterator[tuple[LiveServer, OpenAI]]:
    server = LiveServer("--dtype", "float32", "--threads", "1", *flags, module="ssd_ascend.serve", port=port)
    try:
        until(lambda: server.process.poll() is not None or any(line.startswith("ready: ") for line in server.lines))
        assert server.process.poll() is None, "".join(server.errors[-20:])
        url = server.lines[-1].rsplit(" ", 1)[-1].strip()
        yield server, OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0, max_retries=0)
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)


def free_port() -> str:
    """Ray Serve takes no port of the system's choice."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return str(held.getsockname()[1])


def answer(client: OpenAI) -> str:
    model = client.models.list().data[0].id
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0.0).choices[0].text


def role(name: str) -> Any:
    """The actor of a role, by its name in the plan."""
    found = [
        ray.get_actor(each["name"], namespace=each["namespace"])
        for each in ray.util.list_named_actors(all_namespaces=True)
        if re.fullmatch(rf"ssd_ascend {name} \d+", each["name"])
    ]
    assert len(found) == 1, name
    return found[0]


def pid_of(name: str) -> int:
    return int(ray.get(role(name).pid.remote(), timeout=60.0))


def kill_actor(name: str) -> None:
    """End the actor's own process; that of its role dies with it."""
    stat = Path(f"/proc/{pid_of(name)}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


def until(done: Callable[[], bool]) -> None:
    """Ask again and again: processes that load a model on a busy machine take their time."""
    deadline = time.monotonic() + 240.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_two_replicas_with_a_speculator_each_serve_and_heal(expected: str) -> None:
    """The plan of `laptop-cpu`: every answer is plain decoding's, whoever dies meanwhile."""
    plan = ("--topology", "laptop-cpu", "--preset", "smollm2-135m-eagle3", "--replicas", "2", "--speculator", "ssd")
    with cluster(4) as address, serving(*plan, "--ray", address) as (server, client):
        line = next(line for line in server.lines if line.startswith("plan: "))
        assert "2 replicas of 1 devices and 1 speculators, ssd" in line
        before = {name: pid_of(name) for name in ("replica 0", "replica 1", "speculator 0.0", "speculator 1.0")}
        assert len(set(before.values())) == 4
        assert answer(client) == expected
        for name in ("replica 0", "speculator 1.0"):
            kill_actor(name)
            for _ in range(3):
                assert answer(client) == expected
            until(lambda name=name: pid_of(name) != before[name])  # type: ignore[misc]
        until(lambda: bool(re.search(r'"status": ?"ready"', client._client.get("../health").text)))
        assert answer(client) == expected


def test_a_target_over_three_nodes(expected: str, tmp_path: Path) -> None:
    """A rank on each node; one that dies takes the engine along, and both come back."""
    text = LAPTOP.read_text("utf-8").replace('name = "laptop-cpu"', 'name = "three-hosts"')
    text = text.replace("devices = 4\nnodes = 1", "devices = 3\nnodes = 3").replace("fanout = 4", "fanout = 1")
    rack = text[text.index("[levels.node]") : text.index("[software]")].replace("levels.node", "levels.rack")
    text = text.replace("[software]", rack.replace("fanout = 1", "fanout = 3") + "[software]")
    text = text.replace("tp_sizes = [1, 2, 4]", "tp_sizes = [1, 3]").replace('max_level = "node"', 'max_level = "rack"')
    topology = tmp_path / "three-hosts.toml"
    topology.write_text(text, "utf-8")
    plan = ("--topology", str(topology), "--preset", "smollm2-135m", "--tp", "3")
    with cluster(1, 1, 1) as address, serving(*plan, "--ray", address) as (_, client):
        names = ("replica 0", "replica 0 rank 1", "replica 0 rank 2")
        nodes = {ray.get(role(name).node.remote(), timeout=60.0) for name in names}
        assert len(nodes) == 3
        assert answer(client) == expected
        pid = pid_of("replica 0 rank 2")
        kill_actor("replica 0 rank 2")
        until(lambda: pid_of("replica 0 rank 2") != pid)
        until(lambda: bool(re.search(r'"status": ?"ready"', client._client.get("../health").text)))
        assert answer(client) == expected


def test_ray_serve_in_front(expected: str) -> None:
    """The router as a Ray Serve application: answers and streams pass, mistakes are the replica's to tell, who dies
    heals, and a conversation stays with the replica that has read it."""
    plan = ("--topology", "laptop-cpu", "--preset", "smollm2-135m", "--replicas", "2")
    with cluster(4) as address, serving(*plan, "--ray", address, "--ray-serve", port=free_port()) as (_, client):
        assert answer(client) == expected
        model = client.models.list().data[0].id
        asked = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
        stream = client.completions.create(**asked, stream=True)
        pieces = [event.choices[0].text for event in stream if event.choices]
        assert len(pieces) > 1
        assert "".join(pieces) == expected
        with pytest.raises(BadRequestError, match="max_tokens"):
            client.completions.create(**asked | {"max_tokens": -1})
        for i in range(4):
            client.completions.create(**asked | {"prompt": "the same beginning, " * 30 + str(i), "max_tokens": 1})
        metrics = client._client.get("../metrics").text
        assert re.search(r"^ssd_router_prefix_requests_total 3$", metrics, re.MULTILINE)
        pid = pid_of("replica 0")
        kill_actor("replica 0")
        for _ in range(3):
            assert answer(client) == expected
        until(lambda: pid_of("replica 0") != pid)
        until(lambda: client._client.get("../health").json()["status"] == "ready")
        assert answer(client) == expected
