"""Two servers behind the router, kept alive: streams pass, conversations stay, a killed server costs no request."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from ssd_ascend import catalogue
from ssd_ascend.config.plan import Wish
from ssd_ascend.errors import ConfigError
from ssd_ascend.flags import add_engine_arguments
from ssd_ascend.planner import make_plan
from ssd_ascend.serve import launch, silence
from ssd_ascend.serve.arguments import parse_arguments
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.fleet import Fleet, Placed, place, speculators_of
from ssd_ascend.serve.launch import flags_for
from ssd_ascend.serve.roles import Flags, Role, meeting, on_devices, roles_of
from ssd_ascend.serve.router import Health, Router
from ssd_ascend.serve.routing import Replica
from tests.serve.live import FAKE, PATIENCE_S

LONG = "the same beginning of a conversation, " * 30


def fakes(count: int, model: Path) -> list[Role]:
    return [
        Role(
            name=f"replica {i}", kind="target", module=FAKE, replica=i, node=0, devices=(i,),
            flags=("--model", str(model)),
        )
        for i in range(count)
    ]  # fmt: skip


@asynccontextmanager
async def cluster(model: Path, count: int = 2, silence_s: float = math.inf) -> AsyncIterator[tuple[Fleet, Router, str]]:
    fleet = Fleet(place(fakes(count, model)), silence_s)
    router = Router([Replica(each.role.name, each.host, each.port) for each in fleet.placed])
    port = await router.start("127.0.0.1", 0)
    fleet.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await router.wait_until_ready()
        yield fleet, router, f"http://127.0.0.1:{port}"
    finally:
        await router.close(1.0)
        await fleet.close(10.0)


async def ask(client: httpx.AsyncClient, url: str, text: str, **more: object) -> httpx.Response:
    body = {"prompt": text, "max_tokens": 4, "temperature": 0, **more}
    return await client.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


async def said_in_http_1_0(url: str, body: dict[str, object]) -> bytes:
    """All that comes back, head and body."""
    content, (host, port) = json.dumps(body).encode(), url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
    said = await reader.read(-1)
    writer.close()
    return said


async def live(model: Path) -> None:
    async with cluster(model) as (fleet, router, url), httpx.AsyncClient() as client:
        health = (await client.get(f"{url}/health")).json()
        assert health["status"] == "ready"
        assert [each["name"] for each in health["replicas"]] == ["replica 0", "replica 1"]
        first = [await ask(client, url, LONG + str(i)) for i in range(4)]
        assert {response.status_code for response in first} == {200}
        assert sorted(replica.requests for replica in router.replicas) == [0, 4]  # one conversation
        assert (await ask(client, url, "x", max_tokens=-1)).status_code == 400  # a replica's own word
        stream = await ask(client, url, LONG, stream=True)
        assert stream.text.rstrip().endswith("data: [DONE]")
        assert json.loads(stream.text.split("\n\n")[0].removeprefix("data: "))["object"] == "text_completion"
        await killed(client, url, fleet, router)
        assert (await client.head(f"{url}/v1/models")).headers["content-length"] != "0"
        old = await said_in_http_1_0(url, {"prompt": "hi", "max_tokens": 4, "stream": True})
        assert b"chunked" not in old
        assert old.endswith(b"data: [DONE]\n\n")
        metrics = (await client.get(f"{url}/metrics")).text
        assert 'ssd_router_ready{replica="replica 0"} 1' in metrics


async def killed(client: httpx.AsyncClient, url: str, fleet: Fleet, router: Router) -> None:
    """The server that holds the conversation is killed between two requests, and comes back."""
    holder = max(router.replicas, key=lambda replica: replica.requests)
    pid = fleet.pid(holder.name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for i in range(5):
        assert (await ask(client, url, LONG + str(i))).status_code == 200
    async with asyncio.timeout(PATIENCE_S):
        while fleet.restarts == 0 or not holder.is_ready:
            assert (await ask(client, url, LONG)).status_code == 200
            await asyncio.sleep(0.05)
    assert fleet.pid(holder.name) != pid


def test_a_server_that_hangs_is_replaced(parrot: Path) -> None:
    """It is stopped: it keeps its port, and takes connections. Meanwhile the other one answers."""

    async def run() -> None:
        async with cluster(parrot, silence_s=2.0) as (fleet, router, url), httpx.AsyncClient() as client:
            stopped, _ = router.replicas
            pid = fleet.pid(stopped.name)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                while fleet.pid(stopped.name) == pid:
                    await asyncio.sleep(0.05)
                while not stopped.is_ready or fleet.pid(stopped.name) is None:
                    await asyncio.sleep(0.05)
            assert fleet.restarts >= 1
            assert (await ask(client, url, LONG)).status_code == 200

    asyncio.run(run())


def test_silence_is_what_follows_an_answer_unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads, or hangs up, or talks nonsense is not silent."""
    silent, answers = [TimeoutError()], [Health(True, "ready", "")]
    script: list[Exception | Health] = [
        *silent * 9, OSError(), *answers, *silent * 3, *answers, *silent * 3, OSError(), *silent * 3, ValueError(),
        *silent * 4,
    ]  # fmt: skip
    left = iter(script)

    async def told(replica: Replica) -> Health:
        word = next(left)
        if isinstance(word, Exception):
            raise word
        return word

    monkeypatch.setattr(silence, "health_of", told)
    asyncio.run(silence.until_silent("host", 1, 0.02))
    assert list(left) == []


@pytest.mark.parametrize(("given", "limit"), [(None, 300.0), (5.0, 5.0), (0.0, math.inf)])
def test_the_limit_of_a_step_is_that_of_silence(given: float | None, limit: float) -> None:
    flags = [] if given is None else ["--step-timeout", str(given)]
    args = parse_arguments(["--topology", "laptop-cpu", *flags], add_engine_arguments)
    fleet = launch._fleet(args, [], catalogue.find_topology("laptop-cpu"))
    assert isinstance(fleet, Fleet)
    assert fleet._silence_s == limit


def test_a_process_that_cannot_be_started_is_tried_again(parrot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr("ssd_ascend.serve.fleet._FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr("ssd_ascend.serve.fleet.sys.executable", "/nowhere/at/all")
        fleet = Fleet(place(fakes(1, parrot)))
        fleet.start()
        async with asyncio.timeout(PATIENCE_S):
            while fleet.restarts < 2:
                await asyncio.sleep(0.01)
            monkeypatch.undo()
            while fleet.pid("replica 0") is None:
                await asyncio.sleep(0.01)
        await fleet.close(10.0)
        assert fleet.pid("replica 0") is None

    asyncio.run(run())


def test_nobody_waits_for_the_pause_before_another_start(parrot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr("ssd_ascend.serve.fleet._FIRST_PAUSE_S", 1e6)
        monkeypatch.setattr("ssd_ascend.serve.fleet.sys.executable", "/nowhere/at/all")
        fleet = Fleet(place(fakes(1, parrot)))
        fleet.start()
        async with asyncio.timeout(PATIENCE_S):
            while fleet.restarts < 1:
                await asyncio.sleep(0.01)
            await fleet.close(1e6)

    asyncio.run(run())


def test_what_ends_with_the_signal_that_stops_us_is_not_started_anew(parrot: Path) -> None:
    """A terminal's Ctrl-C reaches the servers, too, and they drain beside the router."""

    async def run() -> None:
        fleet = Fleet(place(fakes(1, parrot)))
        fleet.start()
        async with asyncio.timeout(PATIENCE_S):
            while (pid := fleet.pid("replica 0")) is None:
                await asyncio.sleep(0.01)
            fleet.retire()
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*fleet._keepers)
        assert fleet.restarts == 0
        await fleet.close(10.0)

    asyncio.run(run())


def test_a_second_signal_does_not_wait_for_the_plans_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router would wait for requests, and then the fleet for its processes."""
    told: list[str] = []

    class Slow:
        placed: tuple[Placed, ...] = ()

        async def start(self, host: str, port: int) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return 1

        async def wait_until_ready(self) -> None:
            pass

        async def close(self, seconds: float) -> None:
            told.append("the router closes")
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(PATIENCE_S)

    class Crew(Slow):
        def start(self) -> None:  # type: ignore[override]
            told.append("the fleet starts")

        def retire(self) -> None:
            told.append("the fleet retires")

        async def close(self, seconds: float) -> None:
            told.append("the fleet closes")
            try:
                await asyncio.sleep(PATIENCE_S)
            finally:
                told.append("at once")

    monkeypatch.setattr(launch, "_fleet", lambda *_: Crew())
    monkeypatch.setattr(launch, "_front", lambda *_: Slow())
    topology = catalogue.find_topology("laptop-cpu")

    async def run() -> None:
        args = parse_arguments(["--topology", "laptop-cpu"], add_engine_arguments)
        async with asyncio.timeout(PATIENCE_S / 2.0):
            await launch._serve(args, ServerConfig(), [], topology, lambda line: None)

    asyncio.run(run())
    assert told == ["the fleet starts", "the fleet retires", "the router closes", "the fleet closes", "at once"]


def test_two_servers_behind_a_router(parrot: Path) -> None:
    asyncio.run(live(parrot))


def test_nobody_there_is_503_and_nonsense_400(tmp_path: Path) -> None:
    async def run() -> None:
        router = Router([Replica("replica 0", "127.0.0.1", 1)])
        port = await router.start("127.0.0.1", 0)
        async with httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{port}"
            assert (await client.get(f"{url}/health")).status_code == 503
            refused = await ask(client, url, "x")
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, "no replica is ready")
        for raw, status in (
            (b"nonsense\r\n\r\n", b"400"),
            (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
            (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"503"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 " + status), raw[:40]
            writer.close()
        await router.close(1.0)

    asyncio.run(run())


def test_a_plan_becomes_processes() -> None:
    topology = catalogue.find_topology("nvidia-h200-8")
    wish = Wish(replicas=1, tp=4, speculator="ssd", speculators=2, batch=8)
    plan = make_plan(topology, catalogue.find_preset("llama-3.1-8b-eagle3"), wish, preset_name="llama-3.1-8b-eagle3")
    roles = [on_devices(role, topology) for role in roles_of(plan, topology, flags_for(["--dtype", "bfloat16"]))]
    assert [role.kind for role in roles] == ["speculator", "speculator", "target"]
    target = roles[-1]
    assert target.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, plan.replicas[0].target))
    assert [role.env["CUDA_VISIBLE_DEVICES"] for role in roles[:2]] == [str(d) for d in plan.replicas[0].speculators]
    placed = [Placed(role, "host", 7000 + i) for i, role in enumerate(roles)]
    command = target.command("127.0.0.1", 8001, speculators_of(placed, 0))
    assert command[0] == "ssd_ascend.serve"
    flags = dict(zip(command[1::2], command[2::2], strict=True))
    assert flags["--model"] == "llama-3.1-8b-eagle3"
    assert flags["--tp"] == "4"
    assert flags["--speculator"] == "ssd"
    assert flags["--lookahead"] == str(plan.lookahead)
    assert flags["--speculators"] == "host:7000,host:7001"
    assert flags["--dtype"] == "bfloat16"


def test_a_speculator_that_reads_its_targets_memory_is_started_by_it() -> None:
    topology, preset = catalogue.find_topology("nvidia-h200-8"), "llama-3.1-8b-eagle3"
    wish = Wish(replicas=2, tp=2, speculator="ssd", speculators=1)
    plan = make_plan(topology, catalogue.find_preset(preset), wish, preset_name=preset)
    roles = [on_devices(role, topology) for role in roles_of(plan, topology, Flags())]
    assert [role.kind for role in roles] == ["target", "target"]
    for role, replica in zip(roles, plan.replicas, strict=True):
        assert role.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, (*replica.target, *replica.speculators)))
        command = role.command("127.0.0.1", 8001)
        flags = dict(zip(command[1::2], command[2::2], strict=True))
        assert flags["--draft-device"] == "cuda:2"  # the one behind its ranks
        assert flags["--speculator"] == "ssd"
        assert "--speculators" not in flags


def test_a_target_over_several_nodes_is_a_process_for_each_rank() -> None:
    """Rank 0 is the target, in the address of which the others find each other; by itself one node cannot carry it."""
    name = "llama-3.1-70b-draft-1b"
    topology = catalogue.find_topology("nvidia-gb200-nvl72")
    plan = make_plan(topology, catalogue.find_preset(name), Wish(tp=16, speculator="none"), preset_name=name)
    roles = roles_of(plan, topology, Flags())
    assert [role.kind for role in roles] == ["target"] + ["rank"] * 15
    assert [role.rank for role in roles] == list(range(16))
    assert [(role.node, role.devices) for role in roles[3:6]] == [(0, (3,)), (1, (0,)), (1, (1,))]
    assert len({role.flags for role in roles}) == 1
    assert meeting(roles[5], "host", 9000) == {
        "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "9000",
    }  # fmt: skip
    args = parse_arguments(["--topology", topology.name, "--preset", name, "--tp", "16"], add_engine_arguments)
    with pytest.raises(ConfigError, match=r"uses 4 nodes .*--ray ADDRESS"):
        launch._fleet(args, roles, topology)


def test_a_target_inside_a_node_needs_no_meeting() -> None:
    topology = catalogue.find_topology("nvidia-h200-8")
    wish = Wish(tp=4, batch=2, speculators=2)
    plan = make_plan(topology, catalogue.find_preset("qwen3-8b-eagle3"), wish, preset_name="qwen3-8b-eagle3")
    target = next(role for role in roles_of(plan, topology, Flags()) if role.kind == "target")
    assert (target.ranks, target.devices) == (1, plan.replicas[0].target)
    assert meeting(target, "host", 9000) == {}


def test_every_process_gets_the_flags_it_knows() -> None:
    """The plan's and the launcher's go to nobody, the server's to targets only."""
    ours = ["--topology", "laptop-cpu", "--preset=p", "--replicas", "2", "--port=9", "--admin-port", "1"]
    server = ["--api-key", "k", "--no-page", "--max-queue=5"]
    engine = ["--dtype", "float32", "--no-graphs"]
    found = flags_for([*ours, *server, *engine])
    assert found.target == (*server, *engine)
    assert found.speculator == tuple(engine)
