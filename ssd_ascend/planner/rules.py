"""The rules of placement as questions: what is refused, why, and what would be the nearest possible. For `search`.

The rules and where they come from are told in docs/topology.md; what shaped a plan is told by `reasons`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ssd_ascend.config.plan import Memory, Mode
from ssd_ascend.errors import ConfigError, unknown_name
from ssd_ascend.planner.memory import largest_context
from ssd_ascend.planner.placement import Placement, largest_count, place
from ssd_ascend.planner.question import Question

FAR_BATCH = 8
FAR_SHARE = 0.05
"""A speculator on another network: greedy, or at most FAR_BATCH sequences and messages below FAR_SHARE of a verify."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A layout that cannot be: what, why, and the nearest that can."""

    what: str
    reason: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of tensor parallelism that divide the target and fit the memory, and why the others do not."""

    fitting: tuple[int, ...]
    refusals: tuple[Refusal, ...]


def check_wish(question: Question) -> None:
    """Refuse what no layout can be: a context beyond the model's positions, an unknown level, drafting without a draft,
    a degree that does not divide."""
    wish, topology = question.wish, question.topology
    positions = question.preset.target.dims.max_model_len
    if positions is not None and wish.context > positions:
        raise ConfigError(
            f"{question.preset.target.name}: a context of {wish.context} tokens is more than its {positions} positions",
            remedy=f"largest possible: --context {positions}",
        )
    if wish.wants_speculators and wish.speculator in ("none", "sd"):
        raise ConfigError(
            f"--speculator {wish.speculator} has no speculators of its own",
            remedy="leave out --speculators and --speculator-level, or ask for --speculator ssd",
        )
    wants_draft = wish.wants_speculators or wish.speculator in ("sd", "ssd")
    if wants_draft and question.draft is None:
        raise ConfigError(
            f"preset {question.preset_name!r} has no draft, so nothing can speculate",
            remedy="take a preset with a draft, or --speculator none",
        )
    if (level := wish.speculator_level) is not None:
        if level not in topology.levels:
            raise unknown_name("level", level, topology.levels, where=topology.name)
        if question.machine.is_farther(level, topology.placement.speculator_max_level):
            raise ConfigError(
                f"{topology.name} allows no speculator over {level!r}",
                remedy=f"nearest possible: {topology.placement.speculator_max_level}",
            )
    if wish.tp is not None:
        _check_degree(question, wish.tp)


def _check_degree(question: Question, tp: int) -> None:
    sizes = question.topology.placement.tp_sizes
    possible = [size for size in sizes if divides(question, size)]
    if tp in possible:
        return
    if not divides(question, tp):
        target = question.target
        reason = f"TP {tp} does not divide the {target.heads} heads ({target.kv_heads} for keys and values)"
    else:
        limit = question.topology.placement.tp_max_level
        reason = f"TP {tp} is none of the sizes of {question.topology.name} ({limit}: {', '.join(map(str, sizes))})"
    near = sorted(sorted(possible, key=lambda size: (abs(size - tp), size))[:2])
    remedy = f"nearest possible: TP {' or '.join(map(str, near))}" if near else None
    raise ConfigError(f"{question.preset.target.name}: {reason}", remedy=remedy)


def divides(question: Question, tp: int) -> bool:
    """Whether heads and MLP split evenly; KV heads are split, or replicated when there are fewer than ranks."""
    target = question.target
    kv_ok = target.kv_heads % tp == 0 or tp % target.kv_heads == 0
    return target.heads % tp == 0 and target.intermediate % tp == 0 and kv_ok


def modes(question: Question) -> tuple[Mode, ...]:
    """The modes to consider."""
    wish = question.wish
    if wish.speculator is not None:
        return (wish.speculator,)
    if wish.wants_speculators:
        return ("ssd",)
    return ("none", "sd", "ssd") if question.draft is not None else ("none",)


def possible_degrees(question: Question) -> Degrees:
    """Which degrees hold the target's weights and KV cache."""
    sizes = question.topology.placement.tp_sizes if question.wish.tp is None else (question.wish.tp,)
    fitting: list[int] = []
    refusals: list[Refusal] = []
    for tp in sizes:
        if not divides(question, tp):
            refusals.append(Refusal(f"TP {tp}", f"does not divide {question.target.heads} heads"))
            continue
        memory, _ = question.memories(tp, 0, "none")
        if memory.fits:
            fitting.append(tp)
        else:
            refusals.append(too_large(question, tp, memory))
    return Degrees(tuple(fitting), tuple(refusals))


def too_large(question: Question, tp: int, memory: Memory, who: str = "the target") -> Refusal:
    """A device that cannot hold its part."""
    wish = question.wish
    context = largest_context(memory, wish.context)
    larger = [size for size in question.topology.placement.tp_sizes if size > tp and divides(question, size)]
    fits = next((size for size in larger if question.memories(size, 0, "none")[0].fits), None)
    options = [f"TP {fits}"] if fits else []
    options += [f"--context {context}"] if context else []
    reason = (
        f"{who} needs {memory.total_gb:.1f} GB a device (weights {memory.weights_gb:.1f}, KV of {wish.batch} x "
        f"{wish.context} tokens {memory.kv_gb:.1f}), and {memory.capacity_gb:.1f} may be filled"
    )
    nearest = f"nearest possible: {' or '.join(options)}" if options else "no size of this cluster holds it"
    return Refusal(f"TP {tp}", reason, nearest)


def no_room(question: Question, tp: int, speculators: int) -> Refusal:
    """Not enough devices where the rules allow them."""
    rules, machine, wish = question.topology.placement, question.machine, question.wish
    what = _named(tp, speculators)
    if wish.replicas > 1 and place(machine, rules, tp=tp, speculators=speculators, replicas=1) is not None:
        return Refusal(what, f"{wish.replicas} replicas do not fit {machine.devices} devices")
    fits = next((size for size, _ in _possible(question, speculators) if size < tp), None)
    if not speculators:
        return Refusal(what, f"there are {machine.devices} devices", f"nearest possible: TP {fits}" if fits else None)
    far = wish.speculator_level or rules.speculator_max_level
    reason = f"no room for {speculators} speculator(s) beside TP {tp} within {far}"
    return Refusal(what, reason, f"nearest possible: TP {fits}" if fits else None)


def _named(tp: int, speculators: int) -> str:
    return f"TP {tp} + {speculators} speculator(s)" if speculators else f"TP {tp}"


def refuse_speculators(question: Question, tp: int, speculators: int, placement: Placement | None) -> Refusal | None:
    """Why this many speculators cannot run beside a target of degree `tp`, or None."""
    wish, what = question.wish, _named(tp, speculators)
    if speculators > wish.batch:
        reason = f"speculators share the work by sequence, and there are {wish.batch}"
        return Refusal(what, reason, f"nearest possible: --speculators {wish.batch}")
    if placement is None:
        return no_room(question, tp, speculators)
    target, speculator = question.memories(tp, speculators, "ssd")
    if not target.fits:
        return too_large(question, tp, target)
    if speculator is not None and not speculator.fits:
        context = largest_context(speculator, wish.context)
        remedy = f"nearest possible: --context {context}" if context else None
        return Refusal(what, f"a speculator needs {speculator.total_gb:.1f} of {speculator.capacity_gb:.1f} GB", remedy)
    return _too_far(question, tp, speculators, placement.level)


def _too_far(question: Question, tp: int, speculators: int, level: str | None) -> Refusal | None:
    """The rule for speculators that another network separates from their target."""
    wish, draft = question.wish, question.draft
    if level is None or draft is None or question.topology.levels[level].reach != "scale_out":
        return None
    if wish.temperature == 0.0:
        return None
    lookahead = question.usual_lookahead
    cost = question.cost(tp, lookahead)
    message, verify = cost.message(draft, speculators, level).us, cost.verify(lookahead + 1).total_us
    if wish.batch <= FAR_BATCH and message < FAR_SHARE * verify:
        return None
    options = ["--temperature 0 (no draft law on the wire)"]
    if wish.batch > FAR_BATCH:
        options.append(f"--batch {FAR_BATCH}")
    near = _nearest_inside(question, speculators, level)
    if near is not None:
        options.append(f"TP {near} with the speculator inside the {question.machine.level_holding(near + 1)}")
    link = question.topology.levels[level].link
    return Refusal(
        f"{_named(tp, speculators)} over {level}",
        f"{link} may carry the draft's law of at most {FAR_BATCH} sequences, while messages stay below {FAR_SHARE:.0%} "
        f"of a verify; these are {wish.batch} at temperature {wish.temperature:g}, {message / 1e3:.2f} ms a round, "
        f"{message / verify:.0%}",
        f"nearest possible: {', or '.join(options)}",
    )


def _nearest_inside(question: Question, speculators: int, level: str) -> int | None:
    """The largest degree whose speculators would sit nearer than `level`."""
    for tp, near in _possible(question, speculators):
        if near.level is not None and question.machine.is_farther(level, near.level):
            return tp
    return None


def _possible(question: Question, speculators: int) -> Iterator[tuple[int, Placement]]:
    """Degrees that hold the target, and where one replica with so many speculators would sit; the largest first."""
    rules = question.topology.placement
    for tp in reversed(rules.tp_sizes):
        if divides(question, tp) and question.memories(tp, speculators, "ssd")[0].fits:
            placement = place(question.machine, rules, tp=tp, speculators=speculators, replicas=1)
            if placement is not None:
                yield tp, placement


def nothing_fits(question: Question, fitting: tuple[int, ...], refusals: list[Refusal]) -> ConfigError:
    """No layout is left: fewer replicas if that would do, else the last refusal that has a remedy."""
    who = f"{question.preset_name} on {question.topology.name}"
    least = question.wish.speculators or (1 if "none" not in modes(question) and "sd" not in modes(question) else 0)
    rules, machine, wish = question.topology.placement, question.machine, question.wish
    counts = {tp: largest_count(machine, rules, tp=tp, speculators=least) for tp in fitting}
    if wish.replicas > 1 and (most := max(counts.values(), default=0)):
        tp = max(counts, key=lambda tp: (counts[tp], tp))
        return ConfigError(
            f"{who}: {wish.replicas} replicas do not fit {machine.devices} devices",
            remedy=f"nearest possible: --replicas {most}, of {_named(tp, least)}",
        )
    told = next((refusal for refusal in reversed(refusals) if refusal.remedy), refusals[-1])
    return ConfigError(f"{who}: {told.what}: {told.reason}", remedy=told.remedy)
