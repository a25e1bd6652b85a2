"""Placement keeps its rules on any machine: nobody shares a device, groups stay together, packages stay whole."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend import catalogue
from ssd_ascend.config.topology import PlacementRules
from ssd_ascend.planner.machine import Machine
from ssd_ascend.planner.placement import largest_count, place

A3 = Machine(("package", "node", "superpod"), (2, 16, 768))


def rules(unit: int = 2, tp_max_level: str = "node", speculator_max_level: str = "superpod") -> PlacementRules:
    return PlacementRules(
        source="a",
        unit=unit,
        tp_sizes=(1, 2, 4, 8, 16),
        tp_max_level=tp_max_level,
        speculator_max_level=speculator_max_level,
    )


@st.composite
def machines(draw: st.DrawFn) -> tuple[Machine, PlacementRules]:
    """Machines of two to four levels with packages of one or two."""
    package = draw(st.sampled_from([1, 2]))
    fanouts = [package, draw(st.sampled_from([2, 4, 8])), *draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))]
    names = ("package", "node", "rack", "pod")[: len(fanouts)]
    machine = Machine(names, tuple(accumulate(fanouts, mul)))
    farthest = draw(st.sampled_from(names[1:]))
    return machine, rules(unit=package, speculator_max_level=farthest)


@settings(max_examples=150, deadline=None)
@given(
    machines(),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 5),
    st.integers(1, 6),
)
def test_the_rules_hold(made: tuple[Machine, PlacementRules], tp: int, speculators: int, replicas: int) -> None:
    machine, limits = made
    placement = place(machine, limits, tp=tp, speculators=speculators, replicas=replicas)
    if placement is None:
        return
    taken = [device for one in placement.replicas for device in one.ranks + one.spare]
    assert len(taken) == len(set(taken))
    assert all(0 <= device < machine.devices for device in taken)
    assert [replica.index for replica in placement.replicas] == list(range(replicas))
    owner = {device: replica.index for replica in placement.replicas for device in replica.ranks + replica.spare}
    for replica in placement.replicas:
        assert len(replica.target) == tp
        assert len(replica.speculators) == speculators
        assert replica.target == tuple(range(replica.target[0], replica.target[0] + tp))
        home = machine.size(machine.level_holding(tp))
        assert replica.target[0] // home == replica.target[-1] // home
        for device in replica.ranks:  # a package belongs to one job
            package = range(device // limits.unit * limits.unit, (device // limits.unit + 1) * limits.unit)
            assert {owner.get(sibling, replica.index) for sibling in package} == {replica.index}
        if tp > 1:
            assert {d // limits.unit for d in replica.target}.isdisjoint(
                {d // limits.unit for d in replica.speculators}
            )
        for device in replica.speculators:
            level = machine.level_between(replica.target[0], device)
            assert not machine.is_farther(level, limits.speculator_max_level)
    assert (placement.level is None) == (speculators == 0)


def test_a_whole_node_of_ranks_sends_its_speculator_next_door() -> None:
    placement = place(A3, rules(), tp=16, speculators=2, replicas=2)
    assert placement is not None
    assert placement.level == "superpod"
    first, second = placement.replicas
    assert (first.target, second.target) == (tuple(range(16)), tuple(range(16, 32)))
    assert (first.speculators, second.speculators) == ((766, 767), (764, 765))


def test_nearest_first() -> None:
    together = place(A3, rules(), tp=8, speculators=3, replicas=1)
    assert together is not None
    assert together.level == "node"
    assert together.replicas[0].speculators == (8, 9, 10)
    assert together.replicas[0].spare == (11,)
    rack = Machine(("node", "rack", "superpod"), (8, 64, 8192))
    apart = place(rack, rules(unit=1), tp=8, speculators=1, replicas=7)
    assert apart is not None
    assert apart.level == "rack"


def test_a_lone_target_may_share_its_package_with_its_own_speculator() -> None:
    placement = place(A3, rules(), tp=1, speculators=1, replicas=2)
    assert placement is not None
    assert [replica.ranks for replica in placement.replicas] == [(0, 1), (2, 3)]
    assert placement.level == "package"


def test_a_level_that_is_asked_for_is_kept() -> None:
    for level in ("package", "node", "superpod"):
        tp = 1 if level == "package" else 2
        placement = place(A3, rules(), tp=tp, speculators=1, replicas=1, at_level=level)
        assert placement is not None
        assert placement.level == level
    assert place(A3, rules(), tp=4, speculators=1, replicas=1, at_level="package") is None


def test_a_group_does_not_straddle() -> None:
    cards = Machine(("group", "node"), (4, 16))
    limits = rules(unit=1, tp_max_level="group", speculator_max_level="group")
    placement = place(cards, limits, tp=2, speculators=1, replicas=4)
    assert placement is not None
    assert [replica.target[0] for replica in placement.replicas] == [0, 4, 8, 12]
    assert place(cards, limits, tp=2, speculators=1, replicas=5) is None
    assert place(cards, limits, tp=4, speculators=1, replicas=1) is None
    assert place(cards, limits, tp=8, speculators=0, replicas=1) is None


@pytest.mark.parametrize(("tp", "speculators", "count"), [(8, 1, 48), (16, 1, 42), (2, 0, 384), (4, 4, 96)])
def test_how_many_fit(tp: int, speculators: int, count: int) -> None:
    assert largest_count(A3, rules(), tp=tp, speculators=speculators) == count


def test_devices_in_words() -> None:
    machine = Machine.of(catalogue.find_topology("ascend-a3-superpod384"))
    assert machine.where(37) == "node 2, package 2, device 37"
    assert machine.where_node(2) == "node 2"
    assert Machine.of(catalogue.find_topology("ascend-a2-8")).where_node(0) == "node"
    assert Machine.of(catalogue.find_topology("ascend-950-superpod")).where_node(9) == "rack 1, node 9"
    assert machine.level_between(0, 1) == "package"
    assert machine.level_between(0, 15) == "node"
    assert machine.level_between(0, 16) == "superpod"
