"""From a plan to the processes that carry it out: command line, environment and devices of each. Pure values.

`fleet.py` starts them on this machine, `ray_fleet.py` on a Ray cluster; `launch.py` is who calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ssd_ascend.config.plan import Plan, Replica
from ssd_ascend.config.topology import Topology
from ssd_ascend.errors import ConfigError
from ssd_ascend.planner.machine import Machine

SECRET = "SSD_SPECULATOR_SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process. `devices` are those of its node, in the order of its ranks; `node` is the node's number."""

    name: str
    kind: Literal["target", "speculator"]
    replica: int
    node: int
    devices: tuple[int, ...]
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    module: str
    """What `python -m` runs."""

    def command(self, host: str, port: int, speculators: Sequence[str] = ()) -> list[str]:
        """Module and flags of this process at an address; a target is told its speculators' addresses."""
        listed = ["--speculators", ",".join(speculators)] if speculators else []
        return [self.module, *self.flags, "--host", host, "--port", str(port), *listed]


class Flags(NamedTuple):
    """What the user gave, for each kind of process; what the plan decides comes after it, and wins."""

    target: tuple[str, ...] = ()
    speculator: tuple[str, ...] = ()


def roles_of(plan: Plan, topology: Topology, flags: Flags) -> list[Role]:
    """Every process of a plan, each replica's speculators before its target.

    ConfigError when the plan cannot be carried out as processes.
    """
    return [role for replica in plan.replicas for role in _roles(plan, topology, replica, flags)]


def _roles(plan: Plan, topology: Topology, replica: Replica, flags: Flags) -> list[Role]:
    machine = Machine.of(topology)
    nodes = {device // machine.node_size for device in replica.target}
    if len(nodes) > 1:
        raise ConfigError(
            f"{plan.topology}: the target of replica {replica.index} has ranks on {len(nodes)} nodes",
            remedy="start such a target under torchrun, one process a device; or choose --tp of at most a node",
        )
    base = ["--model", plan.preset, *_device_flags(topology)]
    how = ["--speculator", plan.mode]
    if plan.mode != "none":
        how += ["--lookahead", str(plan.lookahead)]
    target = Role(
        name=f"replica {replica.index}",
        kind="target",
        module="ssd_ascend.serve",
        replica=replica.index,
        node=nodes.pop(),
        devices=tuple(device % machine.node_size for device in replica.target),
        flags=(*base, *flags.target, "--tp", str(plan.tp), *how),
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
        for number, device in enumerate(replica.speculators)
    ]
    return [*drafting, target]


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
