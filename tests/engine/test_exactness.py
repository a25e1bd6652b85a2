"""*ssd = sd = plain decoding, token for token*, for every speculator and drafter in the registries. Greedy, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.speculation.registry import DRAFTERS, SPECULATORS
from tests.engine.harness import BLOCK, DEVICE, FAMILIES, around, greedy, prompts_of, run, speculation

SPECULATING = [name for name in SPECULATORS.names() if name != "none"]
COMBINATIONS = [(speculator, drafter) for speculator in SPECULATING for drafter in DRAFTERS.names()]
MIXED = prompts_of([1, 5, 17, 33, 16, 48, 2, 15])


def needs_masks() -> None:
    """Ends a test here where one of the two branch layouts is all there is."""
    if not load_backend(DEVICE).capabilities.tree_mask:
        pytest.skip(f"{DEVICE} has no tree masks")


def test_every_family_is_tested() -> None:
    """A family that is added to the registry must be added to the pairs, unless it is another one's class."""
    classes = {family: ARCHITECTURES.get(family) for family in ARCHITECTURES}
    assert {classes[family] for family in FAMILIES} == set(classes.values())
    assert len(FAMILIES) == len(set(classes.values())), "once is enough"


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize(("speculator", "drafter"), COMBINATIONS)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_tokens_are_those_of_plain_decoding(
    pairs: dict[str, Path], family: str, speculator: str, drafter: str, batch: int
) -> None:
    """Batches of mixed lengths."""
    pair = pairs[family]
    plain = run(pair, MIXED[:batch], greedy())
    other = run(pair, MIXED[:batch], greedy(), speculation(pair, speculator, drafter))
    assert other.tokens == plain.tokens
    if drafter != "ngram":
        assert other.stats.speculation.drafted > 0
    if drafter == "model":
        assert other.stats.speculation.accepted > 0
        assert other.stats.steps < plain.stats.steps
        assert speculator != "ssd" or other.stats.speculation.hits > 0


@pytest.mark.parametrize("lookahead", range(1, 8))
@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_every_prompt_length_around_block_edges(pair: Path, drafter: str, lookahead: int) -> None:
    """Prompts of 1..48 tokens in blocks of 16: drafts, recoveries and branches cross every kind of edge (B26, B40a)."""
    prompts = prompts_of([around(length) for length in range(1, 49)])
    plain = run(pair, prompts, greedy(12))
    for speculator in SPECULATING:
        config = speculation(pair, speculator, drafter, lookahead=lookahead)
        assert run(pair, prompts, greedy(12), config).tokens == plain.tokens, speculator


@pytest.mark.parametrize(
    "options",
    [
        {"on_miss": "draft"},
        {"on_miss": "ngram"},
        {"on_miss": "decline"},
        {"fan_out": "auto"},
        {"fan_out": (4, 0, 1, 0, 3)},
        {"fan_out": 1},
        {"lookahead": "auto"},
        {"lookahead": 1, "fan_out": 5},
        {"cache_bias": 0.5},
        {"branch_lowering": "rows"},
        {"branch_lowering": "tree_mask"},
        {"draft_kv_blocks": 12},
        {"draft_kv_blocks": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_no_setting_of_ssd_changes_a_token(pair: Path, drafter: str, options: dict[str, Any]) -> None:
    """Neither how misses are answered, nor how wide the fan, nor a draft cache that is too small for everybody."""
    if options.get("branch_lowering") == "tree_mask":
        needs_masks()
    plain = run(pair, MIXED, greedy())
    other = run(pair, MIXED, greedy(), speculation(pair, "ssd", drafter, **options))
    assert other.tokens == plain.tokens


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_both_branch_layouts_foresee_the_same(pair: Path, drafter: str) -> None:
    """A row per branch and one masked row per sequence: same hits, same drafts, same acceptance."""

    def outcome(layout: str) -> tuple[int, int, int, list[int]]:
        config = speculation(pair, "ssd", drafter, branch_lowering=layout, on_miss="draft")
        stats = run(pair, MIXED, greedy(40), config).stats.speculation
        return stats.hits, stats.drafted, stats.accepted, stats.accepted_per_position

    rows = outcome("rows")
    assert rows[0] > 0
    needs_masks()
    assert rows == outcome("tree_mask")


@pytest.mark.parametrize(("speculator", "drafter"), COMBINATIONS)
def test_a_stop_token_at_every_place_of_a_run(pair: Path, speculator: str, drafter: str) -> None:
    """Wherever in an accepted run the stop falls, the answer ends there, and counts agree with what was emitted."""
    prompts = prompts_of([9])
    config = speculation(pair, speculator, drafter, lookahead=5)
    reference = run(pair, prompts, greedy(20)).tokens[0]
    for place in range(1, 14):
        sampling = greedy(20, stop_token_ids=(reference[place],))
        plain = run(pair, prompts, sampling)
        other = run(pair, prompts, sampling, config)
        assert other.tokens == plain.tokens
        assert (other.last[0].finish_reason, other.last[0].stop_token) == ("stop", reference[place])
        stats = other.last[0].stats
        assert stats is not None
        kept = [source for delta in other.deltas[0] for source in delta.sources or []]
        assert len(kept) == len(other.tokens[0])
        assert sum(source != 0 for source in kept) == stats.accepted <= stats.drafted


@pytest.mark.parametrize(("speculator", "drafter"), COMBINATIONS)
def test_the_token_limit_inside_a_run(pair: Path, speculator: str, drafter: str) -> None:
    """max_tokens 1, 2, ... end exactly there."""
    prompts = prompts_of([7])
    reference = run(pair, prompts, greedy(16)).tokens[0]
    config = speculation(pair, speculator, drafter, lookahead=5)
    for limit in range(1, 13):
        other = run(pair, prompts, greedy(limit), config)
        assert other.tokens[0] == reference[:limit]
        assert other.last[0].finish_reason == "length"


@pytest.mark.parametrize(("speculator", "drafter"), COMBINATIONS)
def test_the_end_of_the_model(pair: Path, speculator: str, drafter: str) -> None:
    """Eight at once run into max_model_len: each ends there with "length" (B33)."""
    prompts = prompts_of([50, 51, 52, 53, 54, 55, 56, 57])
    options = {"max_model_len": 64}
    plain = run(pair, prompts, greedy(None), **options)
    other = run(pair, prompts, greedy(None), speculation(pair, speculator, drafter), **options)
    assert other.tokens == plain.tokens
    assert [len(p) + len(t) for p, t in zip(prompts, other.tokens, strict=True)] == [64] * 8
    assert {delta.finish_reason for delta in other.last} == {"length"}


@pytest.mark.parametrize(("speculator", "drafter"), COMBINATIONS)
def test_preemption_loses_nothing(pair: Path, speculator: str, drafter: str) -> None:
    """A cache for one and a half requests: everybody finishes, as alone (B28)."""
    prompts = prompts_of([around(length) for length in (40, 30, 20, 45, 16, 33)])
    plain = run(pair, prompts, greedy(60))
    other = run(pair, prompts, greedy(60), speculation(pair, speculator, drafter), num_kv_blocks=11)
    assert other.tokens == plain.tokens
    assert other.stats.preemptions > 0


@pytest.mark.parametrize(("speculator", "drafter"), COMBINATIONS)
def test_prefix_hits_and_chunks(pair: Path, speculator: str, drafter: str) -> None:
    """A shared prefix of three blocks, then prompts in chunks of a few tokens: same tokens (B24, B25)."""
    shared = prompts_of([3 * BLOCK])[0]
    prompts = [shared, [*shared, 5], [*shared, 6, 7], shared, shared[: 2 * BLOCK]]
    plain = run(pair, prompts, greedy(), prefix_cache=False)
    config = speculation(pair, speculator, drafter)
    one_by_one = run(pair, prompts, greedy(), config, max_num_seqs=1)
    assert one_by_one.tokens == plain.tokens
    assert one_by_one.stats.cached_tokens >= 4 * BLOCK
    chunked = run(pair, prompts, greedy(), config, max_num_seqs=2, max_batched_tokens=10)
    assert chunked.tokens == plain.tokens


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_prefix_hit_costs_no_acceptance(pair: Path, drafter: str) -> None:
    """The drafter knows the skipped prompt as well as a computed one (B24)."""
    prompt = prompts_of([around(50)])[0]
    cold = run(pair, [prompt], greedy(40), speculation(pair, "sd", drafter), prefix_cache=False)
    warm = run(pair, [prompt, prompt], greedy(40), speculation(pair, "sd", drafter), max_num_seqs=1)
    first, second = (delta.stats for delta in warm.last)
    assert first is not None
    assert second is not None
    assert second.cached_tokens == 3 * BLOCK
    assert second.accepted == first.accepted == cold.stats.speculation.accepted
