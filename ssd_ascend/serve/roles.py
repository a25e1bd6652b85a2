"""From a plan to the processes that carry it out: command line, environment and devices of each. Pure values.

`fleet.py` starts them on this machine, `ray_fleet.py` on a Ray cluster; `launch.py` is who calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ssd_ascend.config.plan import Plan, Replica
from ssd_ascend.config.topology import Topology
from ssd_ascend.planner.machine import Machine

SECRET = "SSD_SPECULATOR_SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process. `devices` are those of its node, in the order of its ranks; `node` is the node's number.

    A target inside one node is one process, which starts its other ranks itself, and a speculator that reads its memory
    (`Plan.own_worker`), whose device is the last of its own. One over several nodes is `ranks`
    processes of a device each: its "target" is rank 0, the others are of kind "rank", and all find each other as under
    `torchrun` (`meeting`).
    """

    name: str
    kind: Literal["target", "rank", "speculator"]
    replica: int
    node: int
    devices: tuple[int, ...]
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    module: str
    """What `python -m` runs."""
    rank: int = 0
    ranks: int = 1

    def command(self, host: str, port: int, speculators: Sequence[str] = ()) -> list[str]:
        """Module and flags of this process at an address; a target is told its speculators' addresses."""
        listed = ["--speculators", ",".join(speculators)] if speculators else []
        return [self.module, *self.flags, "--host", host, "--port", str(port), *listed]


def meeting(role: Role, host: str, port: int) -> dict[str, str]:
    """The environment in which a rank finds the others: a store that rank 0 keeps at this address."""
    if role.ranks == 1:
        return {}
    place = {"RANK": role.rank, "WORLD_SIZE": role.ranks, "LOCAL_RANK": 0, "MASTER_PORT": port}
    return {"MASTER_ADDR": host} | {name: str(value) for name, value in place.items()}


class Flags(NamedTuple):
    """What the user gave, for each kind of process; what the plan decides comes after it, and wins."""

    target: tuple[str, ...] = ()
    speculator: tuple[str, ...] = ()


def roles_of(plan: Plan, topology: Topology, flags: Flags) -> list[Role]:
    """Every process of a plan, each replica's speculators before its target, and a target before its other ranks."""
    return [role for replica in plan.replicas for role in _roles(plan, topology, replica, flags)]


def _roles(plan: Plan, topology: Topology, replica: Replica, flags: Flags) -> list[Role]:
    machine = Machine.of(topology)
    base = ["--model", plan.preset, *_device_flags(topology)]
    how = ["--speculator", plan.mode]
    if plan.mode != "none":
        how += ["--lookahead", str(plan.lookahead)]
    held, apart = (replica.ranks, ()) if plan.own_worker else (replica.target, replica.speculators)
    beside = ["--draft-device", f"{topology.launch.peer_backend}:{plan.tp}"] if plan.own_worker else []
    target = Role(
        name=f"replica {replica.index}",
        kind="target",
        module="ssd_ascend.serve",
        replica=replica.index,
        node=replica.target[0] // machine.node_size,
        devices=tuple(device % machine.node_size for device in held),
        flags=(*base, *flags.target, "--tp", str(plan.tp), *how, *beside),
        env=dict(topology.launch.env),
    )
    drafting = [
        Role(
            name=f"speculator {replica.index}.{number}",
            kind="speculator",
            module="ssd_ascend.speculate",
            replica=replica.index,
            node=device // machine.node_size,
            devices=(device % machine.node_size,),
            flags=(*base, *flags.speculator, *how),
            env=dict(topology.launch.env),
        )
        for number, device in enumerate(apart)
    ]
    nodes = [device // machine.node_size for device in replica.target]
    return [*drafting, *([target] if len(set(nodes)) == 1 else _one_by_one(target, nodes))]


def _one_by_one(target: Role, nodes: Sequence[int]) -> list[Role]:
    """A target over several nodes as a process for each of its ranks."""
    return [
        replace(
            target,
            name=f"{target.name} rank {rank}" if rank else target.name,
            kind="rank" if rank else "target",
            node=node,
            devices=(device,),
            rank=rank,
            ranks=len(nodes),
        )
        for rank, (node, device) in enumerate(zip(nodes, target.devices, strict=True))
    ]


def _device_flags(topology: Topology) -> list[str]:
    """A plan for processes of a CPU runs on it, whatever else the machine has; other devices are found."""
    return ["--device", "cpu"] if topology.device.shares_host else []


def on_devices(role: Role, topology: Topology) -> Role:
    """The role with the environment that shows it its own devices only, numbered from 0."""
    if topology.device.shares_host:
        return role
    shown = ",".join(str(device) for device in sorted(role.devices))
    return replace(role, env={**role.env, topology.launch.device_env: shown})


def with_threads(role: Role, cores: int, processes: int) -> Role:
    """The role with its share of a host's cores, where processes compute on them."""
    return replace(role, env={**role.env, "OMP_NUM_THREADS": str(max(1, cores // max(1, processes)))})
