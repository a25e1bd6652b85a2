"""Drafting in captured graphs: static memory, padding and the arithmetic of whole rounds, on any device.

On a CPU a graph is the function itself, run again (`capturing.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.base import Foresight
from ssd_ascend.speculation.drafters import captured_ahead, captured_chain, captured_forks
from ssd_ascend.speculation.drafters.captured_ahead import CapturedAhead
from ssd_ascend.speculation.drafters.captured_chain import CapturedChains
from ssd_ascend.speculation.drafters.captured_forks import CapturedForks
from ssd_ascend.speculation.drafters.captured_next import CapturedNext
from ssd_ascend.speculation.drafters.feed import feed_sizes
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.guesser import Guesser
from tests.engine.capturing import capture_everywhere
from tests.engine.harness import DEVICE, Run, greedy, prompts_of, run, speculation
from tests.engine.lines import Late, through

PROMPTS = prompts_of([8, 1, 17, 33, 5])
LOOKAHEAD = 4


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this file capture whatever the device, with room for every guess, as single steps have."""
    monkeypatch.setattr(captured_forks, "_MOST_BRANCHES", 512)
    monkeypatch.setattr(captured_ahead, "_MOST_BRANCHES", 512)
    capture_everywhere(monkeypatch)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often chains, next rounds of `sd` and whole rounds were answered by graphs."""
    counts = {"chains": 0, "rounds": 0, "next": 0}

    def count(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            result = own(*args)
            counts[name] += result is not None
            return result

        return wrapper

    monkeypatch.setattr(CapturedChains, "run", count("chains", CapturedChains.run))
    monkeypatch.setattr(CapturedForks, "run", count("rounds", CapturedForks.run))
    monkeypatch.setattr(CapturedNext, "run", count("next", CapturedNext.run))
    return counts


def same_course(one: Run, other: Run) -> None:
    """The same answers, and drafts that fared alike. A round queued ahead still drafts for a row that ended."""
    assert one.tokens == other.tokens
    assert one.stats.speculation.wasted <= other.stats.speculation.wasted
    timeless = [replace(run.stats.speculation, draft_idle_s=0.0, target_wait_s=0.0, wasted=0) for run in (one, other)]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
@pytest.mark.parametrize("speculator", ["sd", "ssd"])
def test_a_captured_round_drafts_what_steps_draft(
    pair: Path, used: dict[str, int], speculator: str, drafter: str
) -> None:
    """Not only the target's tokens are the same, which they would be with any drafts: every draft is."""
    config = speculation(pair, speculator, drafter, lookahead=LOOKAHEAD, on_miss="draft")
    stepwise = run(pair, PROMPTS, greedy(30), config, graphs=False)
    assert not any(used.values())
    captured = run(pair, PROMPTS, greedy(30), config, graphs=True)
    same_course(stepwise, captured)
    assert used["chains"] > 0
    assert (used["rounds"] > 3) is (speculator == "ssd")
    assert (used["next"] > 3) is (speculator == "sd" and DEVICE != "npu")
    assert captured.tokens == run(pair, PROMPTS, greedy(30), graphs=False).tokens


@pytest.mark.skipif(DEVICE == "npu", reason="its branches are always rows, see above")
@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_round_whose_branches_are_rows(pair: Path, used: dict[str, int], drafter: str) -> None:
    """What devices without tree masks capture, on one that has them."""
    config = speculation(pair, "ssd", drafter, lookahead=LOOKAHEAD, on_miss="draft", branch_lowering="rows")
    prompts = [*PROMPTS[:3], *prompts_of([14, 31])]  # of these, some branch off where a block of 16 is full
    stepwise, captured = (run(pair, prompts, greedy(30), config, graphs=on) for on in (False, True))
    same_course(stepwise, captured)
    assert used["rounds"] > 3


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_rows_that_are_drawn_go_step_by_step_beside_greedy_ones(pair: Path, used: dict[str, int], drafter: str) -> None:
    """A sampled row keeps its whole batch out of the graphs of rounds; its steps still replay, to the same tokens."""
    config = speculation(pair, "ssd", drafter, lookahead=LOOKAHEAD, on_miss="draft")
    sampling = [greedy(20), SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)] * 2
    stepwise = run(pair, PROMPTS[:4], sampling, config, graphs=False)
    captured = run(pair, PROMPTS[:4], sampling, config, graphs=True)
    same_course(stepwise, captured)
    assert used["rounds"] == 0


def test_a_tiny_vocabulary_and_an_uneven_fan_out(pair: Path, used: dict[str, int]) -> None:
    """More guesses than there are tokens; depths without a guess."""
    config = speculation(pair, "ssd", "model", lookahead=2, fan_out=(30, 0, 3), on_miss="draft")
    same_course(
        run(pair, PROMPTS, greedy(12), config, graphs=False), run(pair, PROMPTS, greedy(12), config, graphs=True)
    )
    assert used["rounds"] > 3


def test_without_room_for_branches_a_round_goes_step_by_step(pair: Path, used: dict[str, int]) -> None:
    """The drafter's own cache is small: nothing fails, and nothing stays held."""
    config = speculation(pair, "ssd", "model", lookahead=LOOKAHEAD, draft_kv_blocks=9)
    captured = run(pair, PROMPTS, greedy(30), config, graphs=True)
    assert captured.tokens == run(pair, PROMPTS, greedy(30), graphs=False).tokens


def test_many_sequences_share_the_branches_that_a_graph_has(
    pair: Path, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets fewer guesses, the likeliest of every depth first; what is foreseen is still right."""
    monkeypatch.setattr(captured_forks, "_MOST_BRANCHES", 24)
    config = speculation(pair, "ssd", "model", lookahead=LOOKAHEAD, on_miss="draft")
    captured = run(pair, PROMPTS, greedy(30), config, graphs=True)
    assert captured.tokens == run(pair, PROMPTS, greedy(30), graphs=False).tokens
    assert used["rounds"] > 3
    stats = captured.stats.speculation
    assert stats.hits > stats.lookups / 4


def test_sizes_of_feeds_cover_every_batch() -> None:
    sizes = feed_sizes(37, 7)
    assert sizes == sorted(sizes, key=lambda size: -size.tokens)
    for rows in range(1, 38):
        for longest in (1, 3, 7):
            assert any(
                size.rows >= rows and size.tokens >= rows * longest and size.per_row >= longest for size in sizes
            )
    assert {size.tokens for size in feed_sizes(1, 2)} == {2}


def test_what_cannot_be_captured_goes_step_by_step(
    pair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that refuses whole rounds still drafts. One line says so of all chains."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("no more memory\nand advice")

    monkeypatch.setattr(captured_chain._Chain, "capture", refuse)
    monkeypatch.setattr(captured_forks._Glue, "capture", refuse)
    config = speculation(pair, "ssd", "model", lookahead=LOOKAHEAD, on_miss="draft")
    captured = run(pair, PROMPTS, greedy(12), config, graphs=True)
    chains, rounds = (
        [line for line in caplog.messages if line.startswith(f"no graph for {what}")]
        for what in ("chains of rows 8, 4, 2, 1 (no more memory)", "rounds of branches")
    )
    assert (len(chains), len(rounds)) == (1, 1)
    assert captured.tokens == run(pair, PROMPTS, greedy(12), graphs=False).tokens
    assert captured.stats.speculation.hits > 0


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_chains_queued_early_follow_what_the_scheduler_does(pair: Path, used: dict[str, int], drafter: str) -> None:
    """Sequences that end at different times, at an end-of-sequence token, or wait for blocks."""
    sampling = [greedy(n, ignore_eos=n % 2 == 0) for n in (3, 12, 25, 40, 31)]
    cramped = {"num_kv_blocks": 8} if DEVICE == "cpu" else {}
    config = speculation(pair, "sd", drafter, lookahead=LOOKAHEAD)
    captured = run(pair, PROMPTS, sampling, config, graphs=True, **cramped)
    assert captured.tokens == run(pair, PROMPTS, sampling, graphs=False).tokens
    assert used["chains"] + used["next"] > 3


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Workers that think their target waits; counts the rounds that went ahead, and checks each against one that does
    not: the same guesses, the same drafts, but for a last one that is missing behind the last depth."""
    counts = {"ahead": 0, "late": 0}
    own = PagedDrafter.foresee

    def foresee(self: PagedDrafter, seqs: Any, sent: Any, *args: Any, hurry: bool, meanwhile: Any) -> Any:
        others = [seq.others for seq in seqs]
        plain = own(self, seqs, sent, *args, hurry=False, meanwhile=lambda: None)
        for seq, kept in zip(seqs, others, strict=True):
            seq.others = kept
        before = counts["ahead"]
        ahead = own(self, seqs, sent, *args, hurry=True, meanwhile=meanwhile)
        if plain is not None and counts["ahead"] > before:
            drafts = [_by_outcome(foresight) for foresight in (plain, ahead)]
            depth_of = {seq.id: len(tokens) for seq, tokens in zip(seqs, sent, strict=True)}
            for key, found in drafts[1].items():
                if key in drafts[0]:
                    late = key[1] == depth_of[key[0]]
                    counts["late"] += late
                    assert found == drafts[0][key][: len(found)]
                    assert len(found) == LOOKAHEAD - late
            assert set(drafts[1]) <= set(drafts[0]) or any(depth < LOOKAHEAD for depth in depth_of.values())
        return ahead

    run_ahead = CapturedAhead.run

    def counted(self: CapturedAhead, *args: Any) -> Any:
        result = run_ahead(self, *args)
        counts["ahead"] += result is not None
        return result

    monkeypatch.setattr(PagedDrafter, "foresee", foresee)
    monkeypatch.setattr(CapturedAhead, "run", counted)
    return counts


def _by_outcome(foresight: Foresight) -> dict[tuple[int, int, int], list[int]]:
    """The drafts for every outcome: sequence, accepted drafts, token."""
    return dict(zip(foresight.outcomes, foresight.drafts, strict=True))


@pytest.mark.skipif(DEVICE == "npu", reason="it has no tree masks")
@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_a_round_that_goes_ahead_foresees_what_any_round_does(
    pair: Path, hurried: dict[str, int], prompts: int
) -> None:
    config = speculation(pair, "ssd", "model", lookahead=LOOKAHEAD, on_miss="draft")
    ahead = run(pair, PROMPTS[:prompts], greedy(40), config, graphs=True)
    assert ahead.tokens == run(pair, PROMPTS[:prompts], greedy(40), graphs=False).tokens
    assert hurried["ahead"] > 5
    assert hurried["late"] > 5
    stats = ahead.stats.speculation
    assert stats.hits > 0.5 * stats.lookups


@pytest.mark.skipif(DEVICE == "npu", reason="it has no tree masks")
def test_a_round_goes_ahead_with_sequences_that_were_not_foreseen(pair: Path, hurried: dict[str, int]) -> None:
    """Five sequences, of which some declined: those have guesses behind their last token only."""
    config = speculation(pair, "ssd", "model", lookahead=LOOKAHEAD, on_miss="decline")
    ahead = run(pair, PROMPTS, greedy(40), config, graphs=True)
    assert ahead.tokens == run(pair, PROMPTS, greedy(40), graphs=False).tokens
    assert hurried["ahead"] > 5
    stats = ahead.stats.speculation
    assert 0.3 * stats.lookups < stats.hits < stats.lookups


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
@pytest.mark.parametrize("hurry", [False, True])
def test_a_round_may_have_any_of_the_widths_there_are_graphs_for(
    pair: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, hurry: bool
) -> None:
    """The width changes from round to round, and what is foreseen stays right."""
    draw, used = random.Random(4), set[tuple[bool, int]]()
    own, foresee = Guesser.width, PagedDrafter.foresee

    def width(self: Guesser, widths: list[int], *, ahead: bool) -> int:
        own(self, widths, ahead=ahead)
        chosen = draw.choice(widths)
        used.add((ahead, chosen))
        return chosen

    monkeypatch.setattr(Guesser, "width", width)
    monkeypatch.setattr(PagedDrafter, "foresee", lambda *args, **given: foresee(*args, **given | {"hurry": hurry}))
    for module in (captured_forks, captured_ahead):
        monkeypatch.setattr(module, "FEW_BRANCHES", 8)
    config = speculation(pair, "ssd", drafter, lookahead=LOOKAHEAD, on_miss="decline")
    varied = run(pair, PROMPTS, greedy(40), config, graphs=True)
    assert varied.tokens == run(pair, PROMPTS, greedy(40), graphs=False).tokens
    goes_ahead = hurry and drafter == "model" and DEVICE != "npu"
    assert len({chosen for ahead, chosen in used if ahead is goes_ahead}) >= 2
    assert varied.stats.speculation.hits > 3


@pytest.mark.skipif(DEVICE == "npu", reason="it has no tree masks")
def test_going_ahead_with_an_uneven_fan_out(pair: Path, hurried: dict[str, int]) -> None:
    """Depths without a guess, and more guesses behind the last draft than beside the others."""
    config = speculation(pair, "ssd", "model", lookahead=LOOKAHEAD, fan_out=(2, 0, 1, 3, 5), on_miss="draft")
    ahead = run(pair, PROMPTS[:2], greedy(40), config, graphs=True)
    assert ahead.tokens == run(pair, PROMPTS[:2], greedy(40), graphs=False).tokens
    assert hurried["ahead"] > 3


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_worker_that_fell_behind_gets_back_into_its_graphs(
    pair: Path, used: dict[str, int], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Requests pile up for up to twelve steps, so that far more entries are missing than a graph holds."""
    slow: list[int] = []
    own = PagedDrafter.glue

    def glue(self: PagedDrafter, seqs: Any, *args: Any) -> Any:
        slow.append(len(seqs))
        return own(self, seqs, *args)

    monkeypatch.setattr(PagedDrafter, "glue", glue)
    through(monkeypatch, lambda line: Late(line, seed=2, most=12, pile_up=True))
    late = run(pair, PROMPTS, greedy(90), speculation(pair, "ssd", drafter, lookahead=LOOKAHEAD), graphs=True)
    assert late.tokens == run(pair, PROMPTS, greedy(90), graphs=False).tokens
    assert late.stats.speculation.worker_alive
    assert used["rounds"] > 3
    assert slow == []
