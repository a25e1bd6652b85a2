"""The same on Ray, where it is installed: actors serve, and one that is killed comes back. One machine is a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from ssd_ascend import catalogue
from ssd_ascend.serve.router import Router
from ssd_ascend.serve.routing import Replica
from tests.serve.live import PATIENCE_S
from tests.serve.test_fleet import LONG, ask, fakes

pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.mark.slow
def test_a_killed_actor_heals(parrot: Path) -> None:
    from ssd_ascend.serve.ray_fleet import RayFleet

    async def run() -> None:
        fleet = await asyncio.to_thread(RayFleet, "local", fakes(2, parrot), catalogue.find_topology("laptop-cpu"))
        router = Router([Replica(each.role.name, each.host, each.port) for each in fleet.placed])
        port = await router.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(2.0 * PATIENCE_S), httpx.AsyncClient() as client:
                await router.wait_until_ready()
                url = f"http://127.0.0.1:{port}"
                assert (await ask(client, url, LONG)).status_code == 200
                pid = await fleet.actors["replica 0"].pid.remote()
                actor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(actor, signal.SIGKILL)
                while router.replicas[0].is_ready:
                    assert (await ask(client, url, LONG)).status_code == 200
                while not router.replicas[0].is_ready:
                    assert (await ask(client, url, LONG)).status_code == 200
                    await asyncio.sleep(0.1)
                assert await fleet.actors["replica 0"].pid.remote() != pid
        finally:
            await router.close(1.0)
            await fleet.close(10.0)

    asyncio.run(run())
