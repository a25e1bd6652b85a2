"""`python -m ssd_ascend.serve --topology FILE --preset NAME`: plans, starts every process of the plan, and routes.

On this machine by itself (`fleet.py`), or on a Ray cluster (`ray_fleet.py`); `__main__` calls `launch`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ssd_ascend import catalogue, env
from ssd_ascend.config.plan import Plan, Wish
from ssd_ascend.config.topology import Topology
from ssd_ascend.core.random import derive_seed
from ssd_ascend.errors import ConfigError
from ssd_ascend.planner import make_plan
from ssd_ascend.serve.addresses import url_of
from ssd_ascend.serve.arguments import build_parser, server_config
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.fleet import Fleet, Placed, place
from ssd_ascend.serve.launch_flags import LAUNCH_FLAGS
from ssd_ascend.serve.roles import SECRET, Flags, Role, on_devices, roles_of, with_threads
from ssd_ascend.serve.router import Router
from ssd_ascend.serve.routing import Replica
from ssd_ascend.serve.silence import limit_of

_OURS = (*LAUNCH_FLAGS, "--host", "--port", "--tp", "--speculator", "--admin-host", "--admin-port")
"""Flags that are for the launcher alone."""
Check = Callable[[Sequence[str]], object]
"""Raises ConfigError for the flags of a server that could not be."""


class AnyFleet(Protocol):
    """What the launcher asks of whoever runs the processes."""

    placed: list[Placed]

    def start(self) -> None: ...
    def retire(self) -> None: ...
    async def close(self, grace_s: float) -> None: ...


class AnyFront(Protocol):
    """What the launcher asks of whoever passes requests to the replicas."""

    async def start(self, host: str, port: int) -> int: ...
    async def wait_until_ready(self) -> None: ...
    async def close(self, drain_s: float) -> None: ...


def plan_for(args: argparse.Namespace) -> tuple[Plan, Topology]:
    """The plan that the flags ask for. ConfigError when there is none, or a flag is missing."""
    if hasattr(args, "ray_serve") and not hasattr(args, "ray"):
        raise ConfigError("--ray-serve is given, but no Ray cluster", remedy="add --ray ADDRESS, or leave it out")
    if getattr(args, "admin_port", None) is not None:
        raise ConfigError(
            "--admin-port is given, and a plan's servers cannot all have it", remedy="leave it out with --topology"
        )
    if not hasattr(args, "preset"):
        raise ConfigError("--topology is given, but no preset", remedy="add --preset NAME, one of models/")
    topology = catalogue.find_topology(args.topology)
    wish = Wish(
        replicas=getattr(args, "replicas", 1),
        batch=getattr(args, "batch", 1),
        context=getattr(args, "context", 4096),
        tp=getattr(args, "tensor_parallel", None),
        speculator=getattr(args, "speculator", None),
        speculators=getattr(args, "speculators_per_replica", None),
    )
    name = Path(args.preset).name.removesuffix(".toml")
    return make_plan(topology, catalogue.find_preset(args.preset), wish, preset_name=name), topology


def flags_for(argv: Sequence[str], from_file: Sequence[str] = ()) -> Flags:
    """What the processes get of the command line: targets all but the plan's, ours and the addresses; speculators of
    that only what is the engine's.

    from_file: the flags of the file that `--config` names. Targets get its name instead, for there may be keys in it.
    """
    server = {name: action.nargs != 0 for action in build_parser()._actions for name in action.option_strings}
    ours = {name: server.get(name, True) for name in _OURS}
    return Flags(tuple(_without(argv, ours)), tuple(_without([*from_file, *argv], server | ours)))


def _without(argv: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """The words of a command line without some options; the values say which are followed by a word of theirs."""
    kept: list[str] = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in options:
            skip = options[name] and not equals
        else:
            kept.append(word)
    return kept


def launch(args: argparse.Namespace, flags: Flags, announce: Callable[[str], None], check: Check) -> None:
    """Carry the plan out until told to stop. Raises ConfigError when it cannot be.

    flags: of `flags_for`. check: told the flags of a target.
    """
    plan, topology = plan_for(args)
    serving = server_config(args)
    roles = roles_of(plan, topology, flags)
    if Path(args.preset).suffix == ".toml":  # a preset of the user's own is a file to our processes, too
        roles = [_renamed(role, plan.preset, args.preset) for role in roles]
    roles = [_seeded(role, getattr(args, "engine_seed", None)) for role in roles]
    check(_a_target(roles))  # what every replica would refuse, and be restarted for, is refused here
    announce(f"plan: {_summary(plan)}")
    if env.speculator_secret() is None:  # for the lines between our own processes; an empty one is none
        env.hand_down({SECRET: secrets.token_hex(32)})
    asyncio.run(_serve(args, serving, roles, topology, announce))


def _a_target(roles: Sequence[Role]) -> list[str]:
    """The flags of one of the targets, with addresses that stand for those to come."""
    target = next(role for role in roles if role.kind == "target")
    beside = [role for role in roles if role.kind == "speculator" and role.replica == target.replica]
    return target.command("127.0.0.1", 1, [f"127.0.0.1:{port}" for port in range(2, 2 + len(beside))])[1:]


def _renamed(role: Role, name: str, path: str) -> Role:
    return replace(role, flags=tuple(path if flag == name else flag for flag in role.flags))


def _seeded(role: Role, seed: int | None) -> Role:
    """The role with a seed of its replica's own, or equal requests to two of them would draw equal answers."""
    if seed is None or role.replica == 0 or role.kind == "speculator":
        return role
    return replace(role, flags=(*role.flags, "--engine-seed", str(derive_seed(seed, role.replica))))


def _summary(plan: Plan) -> str:
    mode = f"{plan.mode}, lookahead {plan.lookahead}" if plan.mode != "none" else "no speculation"
    return (
        f"{plan.preset} on {plan.topology}: {len(plan.replicas)} replicas of {plan.tp} devices and "
        f"{plan.num_speculators} speculators, {mode}"
    )


async def _serve(
    args: argparse.Namespace,
    serving: ServerConfig,
    roles: list[Role],
    topology: Topology,
    announce: Callable[[str], None],
) -> None:
    fleet = _fleet(args, roles, topology)
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # not before: Ray brings handlers of its own
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    targets = [each for each in fleet.placed if each.role.kind == "target"]
    front = _front(args, serving, [Replica(each.role.name, each.host, each.port) for each in targets])
    url = url_of(serving.host, await front.start(serving.host, serving.port))
    announce(f"loading; {url}/health says which replicas are ready")
    fleet.start()
    ready = asyncio.create_task(front.wait_until_ready())
    ready.add_done_callback(lambda task: None if task.cancelled() else announce(f"ready: {len(targets)} on {url}"))
    try:
        await stop.wait()
    finally:
        ready.cancel()
        fleet.retire()
        await _unless(hurry, front.close(serving.drain_s))
        await _unless(hurry, fleet.close(serving.drain_s))


async def _unless(hurry: asyncio.Event, closing: Coroutine[Any, Any, None]) -> None:
    """Close something, and without patience once there was a second signal."""
    task, hurrying = asyncio.create_task(closing), asyncio.create_task(hurry.wait())
    await asyncio.wait((task, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _front(args: argparse.Namespace, serving: ServerConfig, replicas: list[Replica]) -> AnyFront:
    if not hasattr(args, "ray_serve"):
        return Router(replicas, serving)
    from ssd_ascend.serve.ray_front import ServeFront

    return ServeFront(replicas, serving)


def _fleet(args: argparse.Namespace, roles: list[Role], topology: Topology) -> AnyFleet:
    if hasattr(args, "ray"):
        from ssd_ascend.serve.ray_fleet import RayFleet

        return RayFleet(args.ray, roles, topology)
    if topology.nodes > 1 and any(role.node for role in roles):
        raise ConfigError(
            f"the plan for {topology.name} uses {1 + max(role.node for role in roles)} nodes",
            remedy="give --ray ADDRESS of a cluster over them; by itself this command starts processes on one node",
        )
    own = [on_devices(role, topology) for role in roles]
    if topology.device.shares_host:
        own = [with_threads(role, os.cpu_count() or 1, len(roles)) for role in own]
    return Fleet(place(own), limit_of(getattr(args, "step_timeout_s", None)))
