"""A plan in words for the terminal, and in one row for a table. Called by the door `plan.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssd_ascend.config.plan import Memory, Plan, Replica, in_words
from ssd_ascend.planner.machine import Machine

_SHOWN_REPLICAS = 4


def ranges(devices: Sequence[int]) -> str:
    """Device numbers with runs written short: 0-3, 8."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layout(plan: Plan) -> str:
    """What runs, in a few words: "ssd, TP 4 + 1 speculator over node, lookahead 6"."""
    words = in_words(plan.mode, plan.tp, plan.num_speculators, plan.speculator_level)
    return words if plan.mode == "none" else f"{words}, lookahead {plan.lookahead}"


def text(plan: Plan, machine: Machine) -> str:
    """The whole plan for a reader."""
    wish = plan.wish
    asked = f"{wish.batch} sequence(s) of {wish.context} tokens, temperature {wish.temperature:g}"
    lines = [f"{plan.preset} on {plan.topology}: {layout(plan)}", f"  asked    {asked}, {wish.replicas} replica(s)"]
    lines += [f"  {line}" for line in (*_places(plan, machine), *_numbers(plan))]
    lines += ["", "why"]
    lines += [f"  {reason.rule:<15}{reason.text}" for reason in plan.reasons]
    lines += ["", "next best"] if plan.alternatives else []
    for other in plan.alternatives:
        change = f"would lose {other.loss:.0%}" if other.loss >= 0 else f"would gain {-other.loss:.0%}"
        lines.append(f"  {other.what}: {other.tokens_per_s:.0f} tokens/s on {other.devices} device(s), {change}")
    return "\n".join(lines)


def _places(plan: Plan, machine: Machine) -> Iterator[str]:
    for replica in plan.replicas[:_SHOWN_REPLICAS]:
        yield f"replica {replica.index}: {_who(replica)}   ({machine.where(replica.target[0])})"
    if (rest := len(plan.replicas) - _SHOWN_REPLICAS) > 0:
        yield f"... and {rest} more replica(s), up to device {max(plan.replicas[-1].ranks)}"


def _who(replica: Replica) -> str:
    parts = [f"target {ranges(replica.target)}"]
    parts += [f"speculators {ranges(replica.speculators)}"] if replica.speculators else []
    parts += [f"spare {ranges(replica.spare)}"] if replica.spare else []
    return "; ".join(parts)


def _numbers(plan: Plan) -> Iterator[str]:
    times = plan.times
    parts = [f"decode {times.decode_ms:.2f} ms"]
    if times.draft_ms is not None:
        parts += [f"verify {times.verify_ms:.2f}", f"draft on demand {times.draft_ms:.2f}"]
    if times.wide_draft_ms is not None and times.message_ms is not None:
        parts += [f"draft every branch {times.wide_draft_ms:.2f}", f"message {times.message_ms:.3f}"]
    yield f"times    {', '.join(parts)}"
    count = plan.devices_per_replica
    yield f"speed    of one replica on {count} device(s), {plan.speed.tokens_per_s / count:.1f} tokens/s a device"
    for speed in plan.speeds:
        mark = "->" if speed.mode == plan.mode else "  "
        yield (
            f"{mark} {speed.mode:<5} {speed.tokens_per_s:8.1f} tokens/s   round {speed.round_ms:.2f} ms, "
            f"{speed.tokens_per_round:.2f} tokens"
        )
    yield f"memory   target {_memory(plan.target_memory)}"
    if plan.speculator_memory is not None:
        yield f"memory   speculator {_memory(plan.speculator_memory)}"


def _memory(memory: Memory) -> str:
    return (
        f"{memory.total_gb:.1f} of {memory.capacity_gb:.1f} GB a device (weights {memory.weights_gb:.1f}, "
        f"KV {memory.kv_gb:.1f}, buffers {memory.buffers_gb:.2f})"
    )
