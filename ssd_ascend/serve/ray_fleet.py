"""The processes of a plan on a Ray cluster: an actor for each, placed as the plan says, started anew when it dies.

Needs the extra `ray`. One placement group a replica; what a target has on one node is one bundle, so it stays together.
A target over several nodes is an actor for each rank. The actor only holds the process: requests go to the servers
themselves, never through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from ssd_ascend import env
from ssd_ascend.config.topology import Topology
from ssd_ascend.errors import ConfigError
from ssd_ascend.log import get_logger
from ssd_ascend.serve.fleet import Placed, booted, place, speculators_of
from ssd_ascend.serve.roles import SECRET, Role, meeting

_PLACE_S: Final = 120.0
_CALL_S: Final = 60.0
_LOCAL: Final = "local"
log = get_logger(__name__)


class RoleActor:
    """Runs one role's process on the actor's node. When the process ends, so does the actor, and Ray brings another."""

    def __init__(self, role: Role, variables: dict[str, str], port: int, speculators: Sequence[str]) -> None:
        """The role's process listens at this node's address."""
        self._host: str = import_module("ray").util.get_node_ip_address()
        if variables.get("RANK") == "0":  # the others are told once we are placed
            variables = {**variables, "MASTER_ADDR": self._host}
        self._process = subprocess.Popen(
            [sys.executable, *booted(role.command(self._host, port, speculators))],
            env=env.child(variables),
            stdout=sys.stderr,
        )
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def host(self) -> str:
        """The address of the actor's node."""
        return self._host

    def node(self) -> str:
        """Ray's name of the actor's node."""
        name: str = import_module("ray").get_runtime_context().get_node_id()
        return name

    def pid(self) -> int:
        """The role's process."""
        return self._process.pid

    def stop(self, grace_s: float) -> None:
        """Ask the process to leave, and end it when it does not."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()

    def _end_with_it(self) -> None:
        self._process.wait()
        os._exit(1)  # the one way in which an actor tells Ray that it is of no use any more


class RayFleet:
    """See `launch.AnyFleet`. The constructor places and starts everything, the speculators of each replica first."""

    def __init__(self, address: str, roles: Sequence[Role], topology: Topology) -> None:
        self._ray = _ray()
        self._resource = topology.launch.ray_resource or "CPU"
        # what the processes write goes to Ray's own logs: our standard output is for announcements
        options: dict[str, Any] = {"address": address, "log_to_driver": False}
        if address == _LOCAL:
            options |= {"include_dashboard": False}
            if self._resource == "CPU":
                options |= {"num_cpus": topology.devices}  # the plan's devices are processes
        self._ray.init(**options)
        self._groups: list[Any] = []
        self.actors: dict[str, Any] = {}
        self.placed: list[Placed] = []
        ports = {each.role.name: each.port for each in place(roles)}
        for replica in sorted({role.replica for role in roles}):
            self._start_replica([role for role in roles if role.replica == replica], ports)

    def start(self) -> None:
        """All is on its way already."""

    def retire(self) -> None:
        """Signals that stop us reach no actor: nothing is to be done."""

    async def close(self, grace_s: float) -> None:
        """Stop the processes, then the actors."""
        stops = [actor.stop.remote(grace_s) for actor in self.actors.values()]
        await asyncio.to_thread(self._ray.wait, stops, num_returns=len(stops), timeout=grace_s + 5.0)
        for actor in self.actors.values():
            self._ray.kill(actor)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._ray.shutdown()

    def _start_replica(self, roles: Sequence[Role], ports: dict[str, int]) -> None:
        bundles: dict[str, int] = {}
        for role in roles:
            bundles[_bundle_name(role)] = bundles.get(_bundle_name(role), 0) + len(role.devices)
        group, numbers = self._room_for(bundles), {name: number for number, name in enumerate(bundles)}
        leader = ""
        store = next((ports[role.name] for role in roles if role.rank == 1), 0)  # rank 1 listens nowhere itself
        for role in roles:
            port = ports[role.name]
            variables = {**role.env, **meeting(role, leader, store), SECRET: env.speculator_secret() or ""}
            asked = [] if role.kind == "speculator" else speculators_of(self.placed, role.replica)
            actor = self._actor(role, group, numbers[_bundle_name(role)]).remote(role, variables, port, asked)
            host = self._ray.get(actor.host.remote(), timeout=_CALL_S)
            self.actors[role.name] = actor
            self.placed.append(Placed(role, host, port))
            if role.kind == "target":
                leader = host

    def _room_for(self, bundles: dict[str, int]) -> Any:
        """A placement group with so many devices in each bundle; ConfigError when the cluster has no room for it."""
        group = self._ray.util.placement_group([self._bundle(amount) for amount in bundles.values()], strategy="PACK")
        self._groups.append(group)
        ready, _ = self._ray.wait([group.ready()], timeout=_PLACE_S)
        if not ready:
            wanted = ", ".join(f"{amount} {self._resource} for {name}" for name, amount in bundles.items())
            raise ConfigError(
                f"the Ray cluster has no room within {_PLACE_S:g} s for {wanted}",
                remedy="look at `ray status`: nodes must offer these resources",
            )
        return group

    def _bundle(self, amount: int) -> dict[str, float]:
        bundle = {self._resource: float(amount)}
        return bundle if self._resource == "CPU" else {**bundle, "CPU": 1.0}

    def _actor(self, role: Role, group: Any, index: int) -> Any:
        """What makes the actor of a role, in its bundle."""
        scheduling = import_module("ray.util.scheduling_strategies")
        amount = float(len(role.devices))
        options: dict[str, Any] = {"CPU": {"num_cpus": amount}, "GPU": {"num_gpus": amount}}.get(
            self._resource, {"resources": {self._resource: amount}}
        )
        return self._ray.remote(RoleActor).options(
            name=f"ssd_ascend {role.name} {os.getpid()}",
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
            **options,
        )


def _bundle_name(role: Role) -> str:
    """Roles of one name share a bundle: what a target has on one node, or a speculator by itself."""
    return role.name if role.kind == "speculator" else f"replica {role.replica} on node {role.node}"


def _ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError("--ray needs the package 'ray'", remedy="pip install 'ssd-ascend[ray]'") from error
