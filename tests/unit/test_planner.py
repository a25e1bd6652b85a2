"""Plans: what is chosen, why, what is refused and what would be nearest; every topology x every preset."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend import catalogue
from ssd_ascend.config.plan import Plan, Wish
from ssd_ascend.config.preset import Preset
from ssd_ascend.errors import ConfigError
from ssd_ascend.planner import make_plan
from ssd_ascend.planner.cost import Cost, Load, forward, told_ahead_us
from ssd_ascend.planner.rates import rates_of
from ssd_ascend.planner.shapes import causal_shape, draft_shape, eagle3_shape
from ssd_ascend.planner.table import BEGIN, END, plans_table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "topology.md"


def plan(topology: str, preset: str, **wishes: Any) -> Plan:
    return make_plan(
        catalogue.find_topology(topology), catalogue.find_preset(preset), Wish(**wishes), preset_name=preset
    )


def rule(made: Plan, name: str) -> str:
    """The texts of a rule that fired."""
    return "; ".join(reason.text for reason in made.reasons if reason.rule == name)


def test_every_topology_with_every_preset_is_in_the_docs() -> None:
    """Each plans or refuses with a reason, and the table in the docs is current."""
    stated = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert stated == plans_table().strip(), "run `python -m ssd_ascend.plan --table docs/topology.md`"
    rows = [line for line in stated.splitlines() if line.startswith("| ") and not line.startswith("| preset")]
    assert len(rows) == len(catalogue.names("topology")) * len(catalogue.names("models"))
    refused = [row for row in rows if "| no: " in row]
    assert refused
    assert all("GB a device" in row for row in refused)


def test_weights_are_counted_as_the_models_are_known_for() -> None:
    def billions(preset: str) -> float:
        return causal_shape(catalogue.find_preset(preset).target.dims).resident_params / 1e9

    # the parameter counts of the model cards, which include norms that are too small to matter
    assert billions("llama-3.1-8b-eagle3") == pytest.approx(8.03, abs=0.01)
    assert billions("llama-3.3-70b-eagle3") == pytest.approx(70.55, abs=0.05)
    assert billions("qwen3-8b-eagle3") == pytest.approx(8.19, abs=0.01)
    assert billions("qwen3-14b-eagle3") == pytest.approx(14.77, abs=0.02)
    assert billions("qwen3-32b-eagle3") == pytest.approx(32.76, abs=0.02)
    assert billions("qwen3-30b-a3b-draft-0.6b") == pytest.approx(30.53, abs=0.02)
    assert billions("qwen3-235b-a22b-draft-0.6b") == pytest.approx(235.09, abs=0.1)
    assert billions("smollm2-135m") == pytest.approx(0.1345, abs=0.0005)


def test_tokens_that_choose_experts_read_more_of_them_together_than_alone() -> None:
    """Qwen3-30B-A3B: 3.3 billion parameters a token by its card, which counts the embedding, too."""
    shape = causal_shape(catalogue.find_preset("qwen3-30b-a3b-draft-0.6b").target.dims)
    embedding = 151936 * 2048
    assert (shape.step_params + embedding) / 1e9 == pytest.approx(3.35, abs=0.02)
    assert shape.read_bytes(1) == pytest.approx(shape.step_bytes)
    assert shape.read_bytes(10_000) == pytest.approx(2 * (shape.resident_params - embedding))
    two = 128 * (1 - (1 - 8 / 128) ** 2) - 8
    assert shape.read_bytes(2) - shape.step_bytes == pytest.approx(two * 48 * 3 * 2048 * 768 * 2)


def test_a_head_weighs_what_its_file_does() -> None:
    """3,121,274,856 bytes is the size of the published file: head, fc and embedding in bfloat16, norms, two maps."""
    preset = catalogue.find_preset("qwen3-32b-eagle3")
    assert preset.draft is not None
    head = eagle3_shape(preset.draft.dims, preset.target.dims)
    maps = 32000 * 8 + preset.target.dims.vocab_size
    assert head.resident_params * 2 + maps == pytest.approx(3_121_274_856, rel=1e-4)


@pytest.mark.parametrize(
    ("topology", "tp", "level"),
    [("ascend-a3-16", 8, "node"), ("ascend-a2-8", 4, "node"), ("nvidia-hopper-8", 4, "node")],
)
def test_the_usual_layouts_of_one_server_come_out(topology: str, tp: int, level: str) -> None:
    """A3: TP 8 and a package of speculators; A2 and eight GPUs: TP 4 and a speculator (the pair of the SSD paper)."""
    made = plan(topology, "llama-3.1-70b-draft-1b")
    assert (made.mode, made.tp, made.speculator_level) == ("ssd", tp, level)
    assert made.replicas[0].target == tuple(range(tp))
    assert made.replicas[0].speculators == (tp,)


def test_a_plan_says_why_and_what_the_next_best_would_lose() -> None:
    made = plan("ascend-a3-16", "qwen3-32b-eagle3")
    assert made.replicas[0].spare == (9,)
    assert "both dies of a package stay in one job" in rule(made, "package")
    assert "% over sd on the same target" in rule(made, "mode")
    assert "TP 16 + 1 speculator(s): no room" in rule(made, "refused")
    assert "tokens only, being greedy" in rule(made, "message")
    assert "no probe ran" in rule(made, "not calibrated")
    assert made.alternatives
    for other in made.alternatives:
        assert other.loss == pytest.approx(1 - other.tokens_per_s / made.speed.tokens_per_s)
        assert other.loss >= 0 or other.devices > made.devices_per_replica
        assert other.loss > -0.06
    assert rule(plan("nvidia-h200-8", "qwen3-8b-eagle3"), "calibrated").startswith("rates measured on")
    assert "do not rank" in rule(plan("ascend-a3-16", "qwen3-8b-eagle3", batch=32), "not calibrated")


def test_a_plan_says_which_wishes_had_no_part_in_it() -> None:
    pair = ("nvidia-h200-8", "qwen3-8b-eagle3")
    none, sd = plan(*pair, speculator="none", lookahead=4, hit_rate=0.5), plan(*pair, speculator="sd", hit_rate=0.5)
    assert rule(none, "ignored") == "--hit-rate, --lookahead: plain decoding drafts nothing"
    assert rule(sd, "ignored") == "--hit-rate: sd drafts in turn with the target"
    assert not rule(plan(*pair, lookahead=4, hit_rate=0.5), "ignored")
    assert not rule(plan("laptop-cpu", "smollm2-135m"), "ignored")
    assert "--lookahead" in rule(plan("laptop-cpu", "smollm2-135m", lookahead=4), "ignored")


def test_a_larger_target_in_a_super_pod_puts_its_speculator_on_another_server() -> None:
    made = plan("ascend-a3-superpod384", "qwen3-32b-eagle3", tp=16, batch=8)
    replica = made.replicas[0]
    assert made.speculator_level == "superpod"
    assert {device // 16 for device in replica.target}.isdisjoint({device // 16 for device in replica.speculators})
    assert made.speculator_memory is not None
    assert made.speculator_memory.fits


def test_more_speculators_when_drafting_is_the_longer_half() -> None:
    made = plan("nvidia-h200-8", "llama-3.1-8b-draft-1b", batch=64, tp=1, speculator="ssd", lookahead=5)
    assert made.num_speculators > 1
    one = plan("nvidia-h200-8", "llama-3.1-8b-draft-1b", batch=64, tp=1, lookahead=5, speculators=1)
    assert made.times.wide_draft_ms is not None
    assert one.times.wide_draft_ms is not None
    assert made.times.wide_draft_ms < one.times.wide_draft_ms
    assert made.speed.tokens_per_s > one.speed.tokens_per_s


def test_speculators_share_what_one_could_not_hold() -> None:
    """The drafts' KV cache is sharded with the sequences, so four speculators hold what one cannot."""
    wishes = {"batch": 128, "context": 60_000, "tp": 8, "replicas": 1, "speculator": "ssd"}
    made = plan("nvidia-gb200-nvl72", "llama-3.1-8b-draft-1b", **wishes)
    assert made.speculator_memory is not None
    assert made.speculator_memory.fits
    with pytest.raises(ConfigError, match=r"a speculator needs .* GB .nearest possible: --context \d+"):
        plan("nvidia-gb200-nvl72", "llama-3.1-8b-draft-1b", **wishes, speculators=1)


def test_a_fan_out_may_be_a_list_and_sets_the_lookahead() -> None:
    made = plan("nvidia-h200-8", "llama-3.1-8b-draft-1b", speculator="ssd", fan_out=(3, 2, 1))
    fewer = plan("nvidia-h200-8", "llama-3.1-8b-draft-1b", speculator="ssd", fan_out=1, lookahead=2)
    assert made.lookahead == 2
    assert (made.times.wide_draft_ms or 0) > (fewer.times.wide_draft_ms or 0)


def test_sampling_sends_the_draft_law() -> None:
    greedy = plan("ascend-a2-8", "qwen3-32b-eagle3", tp=4, speculator="ssd", lookahead=4, batch=4)
    sampled = plan("ascend-a2-8", "qwen3-32b-eagle3", tp=4, speculator="ssd", lookahead=4, batch=4, temperature=0.7)
    assert greedy.times.message_up_bytes == 4 * 8 * 5
    assert sampled.times.message_up_bytes == 4 * 8 * 5 + 4 * 4 * 32000 * 2
    assert sampled.times.message_down_bytes == greedy.times.message_down_bytes
    assert (sampled.times.message_ms or 0) > (greedy.times.message_ms or 0)
    assert "with the draft's law" in rule(sampled, "message")


def test_without_a_draft_there_is_plain_decoding() -> None:
    made = plan("laptop-cpu", "smollm2-135m")
    assert (made.mode, made.tp, made.num_speculators, made.lookahead) == ("none", 1, 0, 0)
    assert [speed.mode for speed in made.speeds] == ["none"]


def small_pair() -> Preset:
    """SmolLM2 with itself as a draft: small enough for the laptop."""
    from ssd_ascend.config.speculation import SpeculationConfig

    alone = catalogue.find_preset("smollm2-135m")
    return replace(alone, draft=alone.target, speculation=SpeculationConfig(speculator="ssd", drafter="model"))


def test_processes_of_one_host_share_its_memory_and_its_speed() -> None:
    laptop = catalogue.find_topology("laptop-cpu")
    one = make_plan(laptop, small_pair(), Wish(speculator="ssd", tp=1), preset_name="pair")
    two = make_plan(laptop, small_pair(), Wish(speculator="ssd", tp=1, replicas=2), preset_name="pair")
    assert [replica.ranks for replica in two.replicas] == [(0, 1), (2, 3)]
    assert two.speed.tokens_per_s < 0.7 * one.speed.tokens_per_s
    assert two.target_memory.capacity_gb == pytest.approx(one.target_memory.capacity_gb / 2)
    assert one.speed.round_ms > one.times.verify_ms + 0.5 * (one.times.wide_draft_ms or 0)
    assert "acceptance 0.6" in rule(one, "assumed")


def test_eight_thousand_devices_are_planned_at_once() -> None:
    """The limit is 5 s; the clock is the process's own, so that a busy machine does not matter."""
    started = time.process_time()
    made = plan("ascend-950-superpod", "llama-3.3-70b-eagle3", replicas=900, batch=4)
    assert time.process_time() - started < 5.0
    taken = [device for replica in made.replicas for device in replica.ranks + replica.spare]
    assert len(taken) == len(set(taken))
    assert max(taken) < 8192


@pytest.mark.parametrize(
    ("topology", "preset", "wishes", "message"),
    [
        (
            "ascend-a2-8",
            "qwen3-8b-eagle3",
            {"tp": 3},
            r"TP 3 does not divide the 32 heads.*nearest possible: TP 2 or 4",
        ),
        ("ascend-a3-16", "qwen3-32b-eagle3", {"tp": 32}, r"TP 32 is none of the sizes.*nearest possible: TP 8 or 16"),
        ("laptop-cpu", "llama-3.3-70b-eagle3", {}, r"needs 36.0 GB a device.*no size of this cluster holds it"),
        ("ascend-a2-8", "llama-3.3-70b-eagle3", {"tp": 1}, r"needs 142.4 GB.*nearest possible: TP 4"),
        ("ascend-a2-8", "qwen3-32b-eagle3", {"batch": 4000}, r"KV of 4000 x 4096.*nearest possible: --context 256"),
        ("laptop-cpu", "smollm2-135m-eagle3", {"context": 8193}, r"8193 tokens .* its 8192 positions .*--context 8192"),
        ("laptop-cpu", "smollm2-135m", {"context": 10**7}, r"its 8192 positions .largest possible: --context 8192"),
        (
            "ascend-a2-roce",
            "qwen3-32b-eagle3",
            {"speculator_level": "cluster", "temperature": 1.0, "batch": 32},
            r"RoCE may carry.*at most 8 sequences.*nearest possible: --temperature 0.*--batch 8, or TP 4 with the "
            r"speculator inside the node",
        ),
        ("ascend-a2-8", "qwen3-32b-eagle3", {"tp": 8, "speculator": "ssd"}, r"no room .*nearest possible: TP 4"),
        ("ascend-a2-8", "qwen3-32b-eagle3", {"replicas": 7}, r"7 replicas do not fit 8 .*--replicas 4, of TP 2"),
        ("ascend-a2-8", "qwen3-32b-eagle3", {"speculators": 4}, r"share the work by sequence.*--speculators 1"),
        ("ascend-a2-8", "qwen3-8b-eagle3", {"speculators": 2, "speculator": "sd"}, r"sd has no speculators of its own"),
        (
            "ascend-a2-8",
            "qwen3-8b-eagle3",
            {"temperature": float("nan")},
            r"temperature is nan .give 0",
        ),
        ("ascend-a2-8", "qwen3-8b-eagle3", {"lookahead": 99}, r"lookahead is 99 .give 1 to 32"),
        ("ascend-a2-8", "qwen3-8b-eagle3", {"fan_out": (2, 1), "lookahead": 3}, r"lists 2 numbers for .*give 4"),
        ("ascend-a2-8", "smollm2-135m", {"speculator": "sd"}, r"has no draft.*take a preset with a draft"),
        ("nvidia-h200-8", "qwen3-8b-eagle3", {"speculator_level": "cluster"}, r"no speculator over 'cluster'.*: node"),
        ("ascend-a3-16", "qwen3-8b-eagle3", {"speculator_level": "nodes"}, r"unknown level 'nodes'.*mean 'node'"),
    ],
)
def test_an_impossible_wish_names_the_nearest_possible(
    topology: str, preset: str, wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(topology, preset, **wishes)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(catalogue.names("topology")),
    st.sampled_from(catalogue.names("models")),
    st.fixed_dictionaries(
        {"batch": st.sampled_from([1, 3, 32, 300]), "context": st.sampled_from([1, 4096, 30_000, 100_000])},
        optional={
            "replicas": st.integers(1, 60),
            "temperature": st.sampled_from([0.0, 0.7]),
            "lookahead": st.integers(1, 12),
            "fan_out": st.integers(1, 8),
            "tp": st.integers(1, 17),
            "speculators": st.integers(1, 9),
            "speculator": st.sampled_from(["none", "sd", "ssd"]),
            "speculator_level": st.sampled_from(["package", "node", "rack", "superpod", "cluster"]),
        },
    ),
)
def test_any_wish_is_planned_or_refused(topology: str, preset: str, wishes: dict[str, Any]) -> None:
    try:
        made = plan(topology, preset, **wishes)
    except ConfigError:
        return
    assert made.target_memory.fits
    assert made.speculator_memory is None or made.speculator_memory.fits
    assert (made.mode == "ssd") == (made.num_speculators > 0)
    assert len(made.replicas) == made.wish.replicas
    assert made.tp == wishes.get("tp", made.tp)
    assert made.num_speculators == wishes.get("speculators", made.num_speculators)
    assert made.speculator_level == wishes.get("speculator_level", made.speculator_level)
    assert made.mode == wishes.get("speculator", made.mode)
    assert made.lookahead == (0 if made.mode == "none" else wishes.get("lookahead", made.lookahead))
    assert all(speed.tokens_per_s > 0 for speed in made.speeds)
    assert all(other.loss > -0.06 for other in made.alternatives)


def test_a_preset_that_does_not_say_its_positions_is_planned_at_any_length() -> None:
    preset = catalogue.find_preset("smollm2-135m")
    unsaid = replace(preset, target=replace(preset.target, dims=replace(preset.target.dims, max_model_len=None)))
    made = make_plan(catalogue.find_topology("laptop-cpu"), unsaid, Wish(context=20_000), preset_name="p")
    assert made.target_memory.fits


def test_the_nearest_possible_is_possible() -> None:
    assert plan("ascend-a2-8", "qwen3-32b-eagle3", replicas=4).tp == 2
    assert plan("ascend-a2-8", "qwen3-32b-eagle3", batch=4000, context=256).mode in ("none", "sd")
    assert plan("laptop-cpu", "smollm2-135m-eagle3", context=8192).wish.context == 8192
    far = {"speculator_level": "cluster", "batch": 32}
    assert plan("ascend-a2-roce", "qwen3-32b-eagle3", **far).speculator_level == "cluster"
    assert plan("ascend-a2-roce", "qwen3-32b-eagle3", **far, tp=8).tp == 8
    near = plan("ascend-a2-roce", "qwen3-32b-eagle3", batch=32, temperature=1.0, tp=4, speculators=1)
    assert near.speculator_level == "node"


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"acceptance": 1.5}, "acceptance is 1.5"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_a_wish_is_checked(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Wish(**wishes)


def cost(**changes: Any) -> Cost:
    preset = catalogue.find_preset("qwen3-32b-eagle3")
    load = {
        "batch": 4,
        "context": 1024,
        "lookahead": 3,
        "width": 12,
        "sampled": False,
        "acceptance": 0.5,
        "hit_rate": 1.0,
    }
    return Cost(
        target=causal_shape(preset.target.dims),
        draft=draft_shape(preset),
        rates=rates_of(catalogue.find_topology("ascend-a3-16"), "bfloat16"),
        load=Load(**(load | changes)),
        tp=8,
        tp_level="node",
    )


def test_expected_tokens_of_a_round() -> None:
    assert cost(acceptance=0.0).load.tokens_per_round == 1.0
    assert cost(acceptance=1.0).load.tokens_per_round == 4.0
    assert cost(acceptance=0.5).load.tokens_per_round == 1 + 0.5 + 0.25 + 0.125


def test_a_missed_row_declines_or_waits_whichever_is_faster() -> None:
    draft = cost().draft
    assert draft is not None
    for hit_rate in (0.0, 0.3, 0.9, 1.0):
        for batch in (1, 8, 32):
            one = cost(hit_rate=hit_rate, batch=batch)
            speed = one.ahead(draft, 1, "node")
            verify, wide = one.verify(4).total_us, one.branching(draft, batch).total_us
            message = one.message(draft, 1, "node")
            base = told_ahead_us(verify, wide, message.us) + one.rates.round_us
            tokens = one.load.tokens_per_round
            chance, late = 1 - hit_rate**batch, one.drafting(draft, batch).total_us + message.us
            declines = batch * (hit_rate * tokens + 1 - hit_rate) / (base + chance * message.hands_us)
            waits = batch * tokens / (base + chance * late)
            assert speed.tokens_per_s == pytest.approx(1e6 * max(declines, waits))
    assert cost(hit_rate=1.0).ahead(draft, 1, "node").tokens_per_round == pytest.approx(1.875)


def test_what_is_told_ahead_needs_no_message_after_the_verdict() -> None:
    """Greedy: two rounds share the way there and back. Sampled: the law is asked for once the verdict is known."""
    greedy, sampled = cost(), cost(sampled=True)
    assert greedy.draft is not None
    for one in (greedy, sampled):
        verify, wide = one.verify(4).total_us, one.branching(greedy.draft, one.load.batch).total_us
        message = one.message(greedy.draft, 1, "node")
        expected = max(verify, wide) + message.us if one is sampled else told_ahead_us(verify, wide, message.us)
        assert one.hit_us(greedy.draft, 1, "node") == pytest.approx(expected + one.rates.round_us)
    assert told_ahead_us(10.0, 4.0, 1.0) == 10.0  # hidden
    assert told_ahead_us(4.0, 10.0, 1.0) == 10.0  # the speculator is the slower one
    assert told_ahead_us(2.0, 4.0, 94.0) == 50.0  # the way is: half of all three


def test_a_kernel_that_hides_nothing_pays_for_reading_and_multiplying() -> None:
    one = cost()
    hidden = replace(one.rates, overlap=1.0)
    both = forward(one.target, one.rates, rows=400, kv_bytes=0.0)
    longer = forward(one.target, hidden, rows=400, kv_bytes=0.0)
    stream, compute = one.target.step_bytes / one.rates.memory, 800 * one.target.step_params / one.rates.compute
    assert both.busy_us == pytest.approx(stream + compute)
    assert longer.busy_us == pytest.approx(max(stream, compute))


def test_bytes_pass_at_the_slower_of_link_and_socket() -> None:
    one = cost(batch=8)
    assert one.draft is not None
    slow = replace(one, rates=replace(one.rates, socket=1e3))
    fast = replace(one, rates=replace(one.rates, socket=None))
    size = sum((slow.message(one.draft, 1, "node").down_bytes, slow.message(one.draft, 1, "node").up_bytes))
    more = slow.message(one.draft, 1, "node").us - fast.message(one.draft, 1, "node").us
    assert more == pytest.approx(size / 1e3 - size / one.rates.links["node"].pair)


def test_features_that_stay_in_place_cost_neither_way_nor_hands() -> None:
    """By one speculator on the target's node, where devices read one another's memory; the numbers still travel."""
    apart = cost(batch=8)
    one = replace(apart, rates=replace(apart.rates, peers=frozenset({"package", "node"})))
    assert one.draft is not None
    assert apart.rates.peers == frozenset()
    features = 8 * 4 * one.draft.feature_bytes
    for speculators, level, stay in ((1, "node", True), (2, "node", False), (1, "package", True)):
        there, here = apart.message(one.draft, speculators, level), one.message(one.draft, speculators, level)
        assert there.down_bytes - here.down_bytes == features * stay
        assert (there.hands_us > here.hands_us) == stay
    missed = [replace(each, load=replace(each.load, hit_rate=0.5)).ahead(one.draft, 1, "node") for each in (apart, one)]
    assert missed[0].round_ms > missed[1].round_ms


def test_a_lone_speculator_beside_its_target_is_the_targets_own() -> None:
    assert plan("nvidia-h200-8", "llama-3.1-8b-eagle3", tp=2, speculator="ssd").own_worker
    assert "features stay where they are" in rule(plan("nvidia-h200-8", "llama-3.1-8b-eagle3", tp=2), "own worker")
    for topology, wishes in (
        ("nvidia-h200-8", {"speculators": 2, "batch": 2}),
        ("nvidia-h200-8", {"speculator": "sd"}),
        ("nvidia-gb200-nvl72", {"tp": 4, "speculator": "ssd"}),
        ("ascend-a3-16", {"speculator": "ssd"}),
    ):
        assert not plan(topology, "llama-3.1-8b-eagle3", **wishes).own_worker, topology


def test_every_branch_costs_the_host_of_its_speculator() -> None:
    one = cost(batch=2)
    assert one.draft is not None
    more = replace(one, rates=replace(one.rates, branch_us=one.rates.branch_us + 10.0))
    added = more.branching(one.draft, 2).total_us - one.branching(one.draft, 2).total_us
    assert added == pytest.approx(10.0 * 2 * one.load.width)


def test_a_round_ahead_hides_the_drafting() -> None:
    one = cost()
    assert one.draft is not None
    ahead, in_turn = one.ahead(one.draft, 1, "node"), one.in_turn(one.draft)
    assert ahead.round_ms < in_turn.round_ms
    assert ahead.round_ms * 1e3 >= one.verify(4).total_us
