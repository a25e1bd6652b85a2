"""From a wish to a plan: list the layouts, drop the impossible ones with their reasons, cost the rest, choose.

The choice: most tokens/s of one replica; among layouts within `TOLERANCE` of the fastest, the one with fewest devices.
"""

from __future__ import annotations

from ssd_ascend.config.plan import Alternative, Mode, Plan, Speed, Wish
from ssd_ascend.config.preset import Preset
from ssd_ascend.config.topology import Topology
from ssd_ascend.planner import rules
from ssd_ascend.planner.cost import shard
from ssd_ascend.planner.machine import Machine
from ssd_ascend.planner.placement import Placement
from ssd_ascend.planner.question import Layout, Question
from ssd_ascend.planner.rates import rates_of
from ssd_ascend.planner.reasons import reasons_for
from ssd_ascend.planner.shapes import Shape, causal_shape, draft_shape

TOLERANCE = 0.05
MAX_SPECULATORS = 8
_WORTH = 0.01
"""One more speculator must bring this much."""


def make_plan(topology: Topology, preset: Preset, wish: Wish, *, preset_name: str) -> Plan:
    """The best plan for `preset` on `topology`; ConfigError, with the nearest that is possible, when there is none."""
    target, draft = causal_shape(preset.target.dims), draft_shape(preset)
    machine, rates = Machine.of(topology), rates_of(topology, target.dtype)
    question = Question(topology, preset, preset_name, wish, machine, target, draft, rates)
    rules.check_wish(question)
    degrees = rules.possible_degrees(question)
    layouts, refusals = [], list(degrees.refusals)
    for tp in degrees.fitting:
        for mode in rules.modes(question):
            found, refused = _layouts(question, tp, mode)
            layouts += found
            refusals += refused
    if not layouts:
        raise rules.nothing_fits(question, degrees.fitting, refusals)
    best = _choose(layouts)
    return _plan(question, best, layouts, refusals)


def _layouts(question: Question, tp: int, mode: Mode) -> tuple[list[Layout], list[rules.Refusal]]:
    """Every layout of one degree and mode, and why others are not possible."""
    if mode != "ssd" or question.draft is None:
        return _alone(question, tp, mode)
    found: list[Layout] = []
    refused: list[rules.Refusal] = []
    most, fastest = min(question.wish.batch, MAX_SPECULATORS), 0.0
    counts = range(1, most + 1) if question.wish.speculators is None else (question.wish.speculators,)
    for speculators in counts:
        placement = question.place(tp, speculators)
        if refusal := rules.refuse_speculators(question, tp, speculators, placement):
            refused.append(refusal)
        if placement is None:
            break  # more of them need more room still
        if refusal or placement.level is None:
            continue
        layouts, hidden = _ahead(question, question.draft, tp, speculators, placement)
        found += layouts
        before, fastest = fastest, max(layout.speed.tokens_per_s for layout in layouts)
        if hidden or fastest < before * (1.0 + _WORTH):
            break
    return found, [] if found else refused[:1]  # what keeps one speculator out says it all


def _ahead(
    question: Question, draft: Shape, tp: int, speculators: int, placement: Placement
) -> tuple[list[Layout], bool]:
    """The layouts of one number of speculators, and whether drafting hides behind verifying at every lookahead."""
    sequences = shard(question.wish.batch, speculators)
    layouts, hidden = [], True
    for lookahead in question.lookaheads:
        cost = question.cost(tp, lookahead)
        speed = cost.ahead(draft, speculators, placement.level or question.machine.names[0])
        layouts.append(Layout("ssd", tp, speculators, lookahead, placement, speed, cost))
        hidden &= cost.branching(draft, sequences).total_us <= cost.verify(lookahead + 1).total_us
    return layouts, hidden


def _alone(question: Question, tp: int, mode: Mode) -> tuple[list[Layout], list[rules.Refusal]]:
    """Plain decoding and classic speculation: the target's devices and no others."""
    placement = question.place(tp, 0)
    if placement is None:
        return [], [rules.no_room(question, tp, 0)]
    target, _ = question.memories(tp, 0, mode)
    if not target.fits:
        return [], [rules.too_large(question, tp, target, "the draft beside the target")]
    found = []
    for lookahead in question.lookaheads if mode == "sd" else question.lookaheads[:1]:
        cost = question.cost(tp, lookahead)
        speed = cost.in_turn(question.draft) if mode == "sd" and question.draft is not None else cost.plain()
        found.append(Layout(mode, tp, 0, lookahead, placement, speed, cost))
    return found, []


def _choose(layouts: list[Layout]) -> Layout:
    fastest = max(layout.speed.tokens_per_s for layout in layouts)
    near = [layout for layout in layouts if layout.speed.tokens_per_s >= (1.0 - TOLERANCE) * fastest]
    return min(near, key=lambda layout: (layout.devices, -layout.speed.tokens_per_s))


def _plan(question: Question, best: Layout, layouts: list[Layout], refusals: list[rules.Refusal]) -> Plan:
    target, speculator = question.memories(best.tp, best.speculators, best.mode)
    speeds = _speeds(question, best, layouts)
    return Plan(
        topology=question.topology.name,
        preset=question.preset_name,
        wish=question.wish,
        mode=best.mode,
        tp=best.tp,
        lookahead=0 if best.mode == "none" else best.lookahead,
        speculator_level=best.placement.level,
        own_worker=best.own_worker,
        replicas=best.placement.replicas,
        times=best.cost.times(best.speculators, best.placement.level),
        speeds=speeds,
        target_memory=target,
        speculator_memory=speculator,
        reasons=reasons_for(question, best, speeds, layouts, refusals),
        alternatives=_alternatives(best, layouts),
        calibrated=question.topology.calibrated is not None,
    )


def _speeds(question: Question, best: Layout, layouts: list[Layout]) -> tuple[Speed, ...]:
    """Every way to decode on the target of the best layout, each with the lookahead that suits it."""
    speeds: list[Speed] = [best.cost.plain()]
    if question.draft is not None:
        in_turn = [one.speed for one in layouts if (one.mode, one.tp) == ("sd", best.tp)]
        speeds.append(max(in_turn, key=lambda speed: speed.tokens_per_s, default=best.cost.in_turn(question.draft)))
    return (*speeds, best.speed) if best.mode == "ssd" else tuple(speeds)


def _alternatives(best: Layout, layouts: list[Layout], most: int = 4) -> tuple[Alternative, ...]:
    """The fastest layouts that differ from the best one in mode or in size, fastest first."""
    ranked: dict[tuple[str, int, int], Layout] = {}
    for layout in sorted(layouts, key=lambda layout: -layout.speed.tokens_per_s):
        ranked.setdefault((layout.mode, layout.tp, layout.speculators), layout)
    ranked.pop((best.mode, best.tp, best.speculators))
    speed = best.speed.tokens_per_s
    return tuple(
        Alternative(layout.what, layout.speed.tokens_per_s, layout.devices, 1.0 - layout.speed.tokens_per_s / speed)
        for layout in list(ranked.values())[:most]
    )
