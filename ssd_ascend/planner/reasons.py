"""Why a plan is as it is: the rules that fired, in sentences with numbers. Called by `search` for the chosen layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssd_ascend.config.plan import Reason, Speed
from ssd_ascend.errors import flag_names
from ssd_ascend.planner.cost import shard
from ssd_ascend.planner.question import ASSUMED_ACCEPTANCE, ASSUMED_HIT_RATE, Layout, Question
from ssd_ascend.planner.rules import Refusal, modes

_LARGE_BATCH = 16
_BRANCHES = ("fan_out", "hit_rate")
_DRAFTS = ("lookahead", "acceptance", *_BRANCHES)
"""Wishes that only matter where something is drafted, and where it is drafted ahead."""


def reasons_for(
    question: Question,
    best: Layout,
    speeds: Sequence[Speed],
    layouts: Sequence[Layout],
    refusals: Sequence[Refusal],
) -> tuple[Reason, ...]:
    """The reasons of a plan, most important first."""
    return (
        *_mode(question, best, speeds),
        *_degree(question, best, layouts),
        *_lookahead(question, best, layouts),
        *_speculators(question, best),
        *_packages(question, best),
        *_messages(question, best),
        *_refused(refusals),
        *_ignored(question),
        *_trust(question, best),
    )


def _mode(question: Question, best: Layout, speeds: Sequence[Speed]) -> Iterator[Reason]:
    speed = best.speed
    if question.draft is None:
        yield Reason("mode", "the preset has no draft: plain decoding")
        return
    other = max((one for one in speeds if one.mode != best.mode), key=lambda one: one.tokens_per_s)
    gain = speed.tokens_per_s / other.tokens_per_s - 1.0
    text = f"{best.mode} gives {speed.tokens_per_s:.0f} tokens/s, {gain:+.0%} over {other.mode} on the same target"
    if best.mode == "ssd":
        missed = "waits for its draft" if speed.on_miss == "draft" else "decodes one token without drafts"
        text += f"; a row the cache did not foresee {missed}"
    yield Reason("mode", text)


def _degree(question: Question, best: Layout, layouts: Sequence[Layout]) -> Iterator[Reason]:
    level = question.machine.level_holding(best.tp)
    yield Reason("tp", f"TP {best.tp} stays inside one {level}, the innermost level that holds it")
    fastest = max(layouts, key=lambda layout: layout.speed.tokens_per_s)
    if fastest.devices > best.devices:
        gain = fastest.speed.tokens_per_s / best.speed.tokens_per_s - 1.0
        yield Reason(
            "devices",
            f"{fastest.what} would be {gain:.1%} faster and take {fastest.devices} devices instead of {best.devices}: "
            "not worth it",
        )


def _lookahead(question: Question, best: Layout, layouts: Sequence[Layout]) -> Iterator[Reason]:
    wanted = question.preset.speculation.lookahead if question.preset.speculation else None
    if best.mode == "none" or question.wish.lookahead is not None or wanted in ("auto", None, best.lookahead):
        return
    same = (best.mode, best.tp, best.speculators)
    found = [one for one in layouts if (one.mode, one.tp, one.speculators) == same and one.lookahead == wanted]
    if found:
        loss = 1.0 - found[0].speed.tokens_per_s / best.speed.tokens_per_s
        yield Reason("lookahead", f"lookahead {best.lookahead}: the preset's {wanted} would lose {loss:.1%}")


def _speculators(question: Question, best: Layout) -> Iterator[Reason]:
    if best.mode != "ssd" or question.draft is None or best.placement.level is None:
        return
    sequences = shard(question.wish.batch, best.speculators)
    draft = best.cost.branching(question.draft, sequences).total_us / 1e3
    verify = best.cost.verify(best.lookahead + 1).total_us / 1e3
    text = f"{best.speculators} speculator(s) prepare {sequences} sequence(s) each in {draft:.2f} ms beside "
    text += f"{verify:.2f} ms"
    if draft > verify:
        bound = (
            "there is one sequence only" if question.wish.batch == 1 else "more of them would not help, or do not fit"
        )
        text += f": drafting is the longer half, but {bound}"
    elif draft < verify / 2:
        text += ": one speculator could serve two targets"
    yield Reason("speculators", text)
    yield Reason("nearness", f"speculators sit as near as there is room: over {best.placement.level}")


def _packages(question: Question, best: Layout) -> Iterator[Reason]:
    unit = question.topology.placement.unit
    if unit == 1:
        return
    spare = len(best.placement.replicas[0].spare)
    text = f"devices are given out in packages of {unit}: both dies of a package stay in one job"
    yield Reason("package", text + (f", so {spare} of each replica stay idle" if spare else ""))


def _messages(question: Question, best: Layout) -> Iterator[Reason]:
    if best.mode != "ssd" or question.draft is None or best.placement.level is None:
        return
    level = best.placement.level
    message = best.cost.message(question.draft, best.speculators, level)
    law = "with the draft's law, because tokens are sampled" if best.cost.load.sampled else "tokens only, being greedy"
    yield Reason(
        "message",
        f"one packed message each way: {message.down_bytes / 1e3:.0f} kB down, {message.up_bytes / 1e3:.1f} kB up "
        f"({law}), {message.us / 1e3:.3f} ms a round",
    )
    if best.own_worker:
        yield Reason(
            "own worker",
            "the target starts its speculator itself, on the next device: these read one another's memory, so that "
            "features stay where they are",
        )
    if best.cost.rates.links[level].assumed:
        yield Reason(
            "unknown", f"the bandwidth of {level} is not published: that of the level inside was taken, a best case"
        )


def _refused(refusals: Sequence[Refusal]) -> Iterator[Reason]:
    """Layouts that were not possible, once each."""
    for refusal in dict.fromkeys(refusals):
        yield Reason("refused", f"{refusal.what}: {refusal.reason}")


def _ignored(question: Question) -> Iterator[Reason]:
    """What was asked for and has no part in any layout; as `serve` says of such flags."""
    possible = modes(question)
    names: tuple[str, ...]
    if possible == ("none",):
        names, why = _DRAFTS, "plain decoding drafts nothing"
    elif "ssd" not in possible:
        names, why = _BRANCHES, "sd drafts in turn with the target"
    else:
        return
    given = [name for name in names if getattr(question.wish, name) is not None]
    if given:
        yield Reason("ignored", f"{flag_names(given)}: {why}")


def _trust(question: Question, best: Layout) -> Iterator[Reason]:
    if question.preset.expected is None and question.draft is not None and question.wish.acceptance is None:
        yield Reason(
            "assumed",
            f"the preset expects nothing: acceptance {ASSUMED_ACCEPTANCE} and hit rate {ASSUMED_HIT_RATE} were taken",
        )
    if question.topology.calibrated is not None:
        yield Reason("calibrated", f"rates measured on {question.topology.calibrated.machine}")
        return
    text = "no probe ran on such a machine: ratios travel better than absolute times"
    if question.wish.batch >= _LARGE_BATCH:
        text += f"; do not rank layouts at {question.wish.batch} sequences by this before it has"
    yield Reason("not calibrated", text)
