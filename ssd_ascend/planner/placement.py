"""Who sits where: first fit over the devices, nearest first. Only `search` calls this, once per layout it considers.

Rules (docs/topology.md): a tensor-parallel group stays inside the innermost level that holds it; devices are given out
in whole units (packages); speculators sit as near to the target's first rank as there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssd_ascend.config.plan import Replica
from ssd_ascend.config.topology import PlacementRules
from ssd_ascend.planner.machine import Machine


@dataclass(frozen=True, slots=True)
class Placement:
    """Every replica's devices, and the farthest level over which any target talks to a speculator (None without)."""

    replicas: tuple[Replica, ...]
    level: str | None


def place(
    machine: Machine, rules: PlacementRules, *, tp: int, speculators: int, replicas: int, at_level: str | None = None
) -> Placement | None:
    """Give `replicas` copies of `tp` ranks and `speculators` their devices, or None when there is no room.

    `at_level` forces the speculators out to that level: outside the instance of the next inner level.
    """
    if tp > machine.size(rules.tp_max_level):
        return None
    near = _place_together(machine, rules, tp, speculators, replicas)
    if not speculators or (near is not None and at_level in (None, near.level)):
        return near
    if at_level is None and _footprint(tp, speculators, rules.unit) <= machine.size(rules.tp_max_level):
        return None  # the layout fits a node, only not that often: farther out there is no more room
    return _place_apart(machine, rules, tp, speculators, replicas, at_level)


def _place_together(
    machine: Machine, rules: PlacementRules, tp: int, speculators: int, replicas: int
) -> Placement | None:
    """Every replica inside one instance of the level that bounds a tensor-parallel group."""
    group, node = machine.size(machine.level_holding(tp)), machine.size(rules.tp_max_level)
    found: list[Replica] = []
    for start in range(0, machine.devices, node):
        _fill_node(found, start, node, group, rules.unit, tp, speculators, replicas)
        if len(found) == replicas:
            return Placement(tuple(found), _farthest(machine, found))
    return None


def largest_count(machine: Machine, rules: PlacementRules, *, tp: int, speculators: int) -> int:
    """How many replicas of this layout the machine holds: for an error's remedy, by bisection."""
    low, high = 0, machine.devices
    while low < high:
        middle = (low + high + 1) // 2
        if place(machine, rules, tp=tp, speculators=speculators, replicas=middle) is None:
            high = middle - 1
        else:
            low = middle
    return low


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _footprint(tp: int, speculators: int, unit: int) -> int:
    """Devices taken: whole units for the target and for the speculators; a lone target shares its unit with its own."""
    if tp == 1:
        return _round_up(1 + speculators, unit)
    return _round_up(tp, unit) + _round_up(speculators, unit)


def _fill_node(
    found: list[Replica], start: int, node: int, group: int, unit: int, tp: int, speculators: int, wanted: int
) -> None:
    """Append the replicas that fit the node at `start`, up to `wanted` in all."""
    free = start
    end = start + node
    while len(found) < wanted:
        if free % group + tp > group:  # a group never straddles two instances of the level that could hold it
            free = _round_up(free, group)
        taken = _footprint(tp, speculators, unit)
        if free + taken > end:
            return
        target = tuple(range(free, free + tp))
        first = free + (tp if tp == 1 else _round_up(tp, unit))
        helpers = tuple(range(first, first + speculators))
        spare = tuple(sorted(set(range(free, free + taken)) - set(target) - set(helpers)))
        found.append(Replica(len(found), target, helpers, spare))
        free += taken


def _place_apart(
    machine: Machine, rules: PlacementRules, tp: int, speculators: int, replicas: int, at_level: str | None
) -> Placement | None:
    """Targets fill nodes, speculators go to other nodes of the same instance of the nearest level that has room."""
    if at_level is not None:
        levels: tuple[str, ...] = (at_level,)
        apart = machine.inner_size(at_level)
    else:
        levels = machine.outward(start=rules.tp_max_level, end=rules.speculator_max_level)[1:]
        apart = machine.size(rules.tp_max_level)
    for level in levels:
        found: list[Replica] = []
        for start in range(0, machine.devices, machine.size(level)):
            _fill_apart(found, machine, rules.unit, start, machine.size(level), apart, tp, speculators, replicas)
            if len(found) == replicas:
                return Placement(tuple(found), _farthest(machine, found))
    return None


def _fill_apart(
    found: list[Replica],
    machine: Machine,
    unit: int,
    start: int,
    size: int,
    apart: int,
    tp: int,
    speculators: int,
    wanted: int,
) -> None:
    """Inside one instance [start, start + size): targets from the front, speculators from the back, never in one
    sub-instance of `apart` devices."""
    if tp > apart:
        return
    group = machine.size(machine.level_holding(tp))
    front, back = start, start + size
    while len(found) < wanted:
        if front % group + tp > group:
            front = _round_up(front, group)
        taken_back = _round_up(speculators, unit)
        taken_front = _round_up(tp, unit)
        helpers_at = back - taken_back
        if (helpers_at // apart) <= (front + taken_front - 1) // apart or helpers_at < start:
            return
        helpers = tuple(range(helpers_at, helpers_at + speculators))
        spare = (*range(front + tp, front + taken_front), *range(helpers_at + speculators, back))
        found.append(Replica(len(found), tuple(range(front, front + tp)), helpers, spare))
        front, back = front + taken_front, helpers_at


def _farthest(machine: Machine, replicas: list[Replica]) -> str | None:
    """The outermost level between any target's first rank and one of its speculators."""
    pairs = {(replica.target[0], device) for replica in replicas for device in replica.speculators}
    return max((machine.level_between(*pair) for pair in pairs), key=machine.names.index, default=None)
