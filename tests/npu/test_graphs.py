"""Captured graphs: the bits of the eager run, lengths re-issued at every replay, and a counted price for each step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ssd_ascend.backends.base import Backend, Graph
from ssd_ascend.backends.npu import emulator
from ssd_ascend.backends.npu.soc import SOCS
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.core.batch import Mode
from ssd_ascend.core.request import EngineRequest
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.runtime.graphs import make_buckets
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.load import CacheSize, load_runner
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.speculation.drafters.captured_chain import CapturedChains, Rolled
from ssd_ascend.speculation.drafters.feed import Feed
from ssd_ascend.speculation.registry import DRAFTERS, SPECULATORS
from tests.engine.harness import drive, greedy, make_engine, prompts_of, run, speculation, write_pair

LAYERS = 4
LOOKAHEAD = 4
PROMPTS = prompts_of([1, 5, 17, 140])
ON_NPU = {"device": "npu", "dtype": "float16", "num_kv_blocks": 64, "max_num_seqs": 4}

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def runner(pair: Path, backend: Backend) -> ModelRunner:
    """A target alone, with graphs for 1, 2 and 4 rows, to decode and to verify."""
    size = CacheSize(max_model_len=512, max_num_seqs=4, num_blocks=16)
    loaded = load_runner(
        pair / "target", backend, backend.device(0), SingleRank(), dtype=torch.float16, block_size=128, size=size
    )
    captured = loaded.runner
    captured.capture_graphs(backend, max_rows=4, lookahead=LOOKAHEAD, max_len=512)
    assert captured.graphs is not None
    assert len(captured.graphs.buckets) == 6
    return captured


def rows_of(lengths: list[tuple[int, int]], seed: int) -> list[Row]:
    """Rows of (start, tokens), each with four blocks of its own."""
    g = torch.Generator().manual_seed(seed)
    return [
        Row(torch.randint(3, 24, (n,), generator=g).tolist(), start, [4 * i + b for b in range(4)], n)
        for i, (start, n) in enumerate(lengths)
    ]


STEPS = [
    (Mode.DECODE, [(100, 1)]),
    (Mode.DECODE, [(100, 1), (127, 1), (3, 1)]),
    (Mode.DECODE, [(128, 1), (255, 1), (40, 1), (9, 1)]),
    (Mode.VERIFY, [(100, 5), (126, 5), (60, 5), (7, 5)]),
    (Mode.VERIFY, [(100, 5), (126, 2), (60, 1), (7, 3)]),
    (Mode.VERIFY, [(300, 3)]),
    (Mode.VERIFY, [(30, 2), (130, 5), (50, 4)]),
]


def test_a_replay_gives_the_bits_of_the_eager_run(runner: ModelRunner) -> None:
    """Full buckets, idle rows, short rows; lengths change from one replay of a bucket to the next."""
    for seed, (mode, lengths) in enumerate([*STEPS, *reversed(STEPS)]):
        rows = rows_of(lengths, seed)
        torch.manual_seed(seed)
        before = torch.randn(runner.kv.tensor.shape).to(runner.kv.tensor.dtype)
        results = []
        for staging in (None, runner.graphs):
            runner.kv.tensor.copy_(before)
            batch = build_batch(mode, rows, block_size=128, device=runner.device, staging=staging)
            replays = emulator.count("graph")
            logits = runner.forward(batch).logits.cpu()
            assert emulator.count("graph") - replays == (staging is not None)
            results.append((logits, runner.kv.tensor.cpu()))
        assert torch.equal(results[0][0], results[1][0]), (mode, lengths)
        assert torch.equal(results[0][1], results[1][1]), (mode, lengths)


def test_a_replay_with_the_lengths_of_another_step_is_wrong(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator freezes lengths as hardware does: without `replan` the step attends to the wrong keys."""
    mode, lengths = STEPS[1]
    assert runner.graphs is not None
    for other in ([(20, 1), (11, 1), (90, 1)], lengths):
        batch = build_batch(mode, rows_of(other, 1), block_size=128, device=runner.device, staging=runner.graphs)
        fresh = runner.forward(batch).logits.cpu()
        monkeypatch.setattr(runner.attention, "replan", lambda meta, bucket: None)
    monkeypatch.undo()
    batch = build_batch(mode, rows_of(lengths, 1), block_size=128, device=runner.device, staging=runner.graphs)
    assert not torch.equal(runner.forward(batch).logits.cpu(), fresh)


def test_what_a_captured_step_costs(runner: ModelRunner) -> None:
    """One graph, one update a layer, one copy to the device; no other launch and no wait."""
    rows = rows_of([(100, 5), (126, 2), (60, 1)], 0)
    watched = ("graph", "update task group", "copy", "synchronize", "aclnnInplaceCopy", "aclnnMatmul", "aclnnRmsNorm")
    batch = build_batch(Mode.VERIFY, rows, block_size=128, device=runner.device, staging=runner.graphs)
    runner.forward(batch)  # both host buffers of the bucket have been used once
    torch.npu.synchronize()
    before = {name: emulator.count(name) for name in watched}
    batch = build_batch(Mode.VERIFY, rows, block_size=128, device=runner.device, staging=runner.graphs)
    runner.forward(batch)
    spent = {name: emulator.count(name) - before[name] for name in watched}
    torch.npu.synchronize()
    assert spent == {
        "graph": 1,
        "update task group": LAYERS,
        "copy": 1,
        "synchronize": 0,
        "aclnnInplaceCopy": 0,
        "aclnnMatmul": 0,
        "aclnnRmsNorm": 0,
    }


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS.names() if name != "ngram"])
@pytest.mark.parametrize("speculator", [name for name in SPECULATORS.names() if name != "none"])
def test_greedy_tokens_with_graphs_are_those_without(pair: Path, speculator: str, drafter: str) -> None:
    eager = run(pair, PROMPTS, greedy(), graphs=False, **ON_NPU)
    replays = emulator.count("graph")
    plain = run(pair, PROMPTS, greedy(), graphs=True, **ON_NPU)
    assert emulator.count("graph") - replays > 10
    other = run(pair, PROMPTS, greedy(), speculation(pair, speculator, drafter), graphs=True, **ON_NPU)
    assert eager.tokens == plain.tokens == other.tokens


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_chain_of_drafts_is_one_graph(pair: Path, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its steps, each with lengths of its own: the drafts of the steps one by one, for one launch a chain."""
    replays: list[int] = []
    own = CapturedChains.run

    def counted(self: CapturedChains, feeds: list[Feed]) -> Rolled | None:
        before = emulator.count("graph")
        rolled = own(self, feeds)
        replays.append(emulator.count("graph") - before if rolled is not None else -1)
        return rolled

    monkeypatch.setattr(CapturedChains, "run", counted)
    config = speculation(pair, "sd", drafter, lookahead=LOOKAHEAD)
    stepwise = run(pair, PROMPTS, greedy(30), config, graphs=False, **ON_NPU)
    assert replays == []
    chained = run(pair, PROMPTS, greedy(30), config, graphs=True, **ON_NPU)
    assert replays.count(1) > 5
    assert set(replays) <= {1, -1}
    assert chained.tokens == stepwise.tokens
    assert chained.stats.speculation.accepted_per_position == stepwise.stats.speculation.accepted_per_position
    assert chained.stats.speculation.accepted > 0


def test_an_engine_may_be_dropped_while_its_graphs_run(pair: Path) -> None:
    """Its last chain of drafts is under way when nobody wants it any more."""
    before = emulator.count("graph destroyed while it ran")
    for _ in range(3):
        engine = make_engine(pair, speculation(pair, "sd", "model", lookahead=LOOKAHEAD), **ON_NPU)
        engine.submit(EngineRequest(id=0, prompt_token_ids=PROMPTS[1], sampling=greedy(80)))
        for _ in range(6):
            engine.step()
        engine.close()
        del engine
        gc.collect()
    torch.npu.synchronize()
    assert emulator.count("graph destroyed while it ran") == before


def test_garbage_may_be_collected_between_the_updates_of_a_replay(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped engine may be found just then: who waits for its graphs waits for the one that waits for us."""
    dropped = make_engine(pair, speculation(pair, "sd", "model", lookahead=LOOKAHEAD), **ON_NPU)
    engine = make_engine(pair, speculation(pair, "sd", "model", lookahead=LOOKAHEAD), **ON_NPU)
    engine.submit(EngineRequest(id=0, prompt_token_ids=PROMPTS[1], sampling=greedy(40)))
    for _ in range(4):
        engine.step()
    begin = torch.npu.graph_task_update_begin
    held, collected = [dropped], []
    del dropped

    def collecting(*arguments: object) -> None:
        if held:
            held.clear()
            collected.append(gc.collect())
        begin(*arguments)

    monkeypatch.setattr(torch.npu, "graph_task_update_begin", collecting)
    waited = emulator.count("synchronize")
    engine.step()
    assert collected
    assert emulator.count("synchronize") - waited <= 1  # the step's own
    engine.close()


@pytest.fixture
def held(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Graph]:
    """All graphs that are held, on a chip that keeps four."""
    from ssd_ascend.backends.npu.graphs import NpuGraphs  # loads torch_npu, which wants the emulator first

    chip = next(soc for soc in SOCS if soc.max_graphs == 4)
    monkeypatch.setattr("ssd_ascend.backends.npu.backend.find_soc", lambda version: chip)
    graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
    own = NpuGraphs.capture

    def capture(self: NpuGraphs, fn: Callable[[], None]) -> Graph:
        graph = own(self, fn)
        graphs.add(graph)
        return graph

    monkeypatch.setattr(NpuGraphs, "capture", capture)
    return graphs


def test_a_chip_that_keeps_few_graphs_has_those_of_the_target_first(
    pair: Path, held: weakref.WeakSet[Graph], caplog: pytest.LogCaptureFixture
) -> None:
    """Target, draft and chains of drafts together: the target's largest, and the rest is eager. Twice: the graphs of an
    engine that was dropped count no more."""
    plain = run(pair, PROMPTS, greedy(20), graphs=False, **ON_NPU)
    for _ in range(2):
        caplog.clear()
        engine = make_engine(pair, speculation(pair, "sd", "model", lookahead=LOOKAHEAD), **ON_NPU)
        graphs = engine._executor.target.runner.graphs
        assert graphs is not None
        assert graphs.buckets[::-1] == make_buckets(4, LOOKAHEAD)[:4]
        assert len(held) == 4
        assert [record.message for record in caplog.records].count(
            "NPU 0 keeps at most 4 captured graphs, and has as many: what comes now runs eagerly"
        ) == 1
        assert drive(engine, PROMPTS, greedy(20)).tokens == plain.tokens
        engine.close()
        del engine, graphs


def test_a_draft_has_the_graphs_that_its_target_leaves(pair: Path, held: weakref.WeakSet[Graph]) -> None:
    options = {**ON_NPU, "max_num_seqs": 1}
    engine = make_engine(pair, speculation(pair, "sd", "model", lookahead=LOOKAHEAD), **options)
    target = engine._executor.target.runner.graphs
    assert target is not None
    assert target.buckets[::-1] == make_buckets(1, LOOKAHEAD)
    assert (len(target.buckets), len(held)) == (2, 4)
    plain = run(pair, PROMPTS, greedy(20), graphs=False, **options)
    assert drive(engine, PROMPTS, greedy(20)).tokens == plain.tokens
    engine.close()


def test_a_capture_that_fails_holds_no_slot(backend: Backend, held: weakref.WeakSet[Graph]) -> None:
    chip = load_backend("npu")
    graphs = chip.graphs(chip.device(3))
    assert graphs is not None

    def fail() -> None:
        raise RuntimeError("out of memory")

    for _ in range(5):
        with pytest.raises(RuntimeError, match="out of memory"):
            graphs.capture(fail)
    kept = [graphs.capture(lambda: None) for _ in range(4)]
    with pytest.raises(RuntimeError, match="keeps no more captured graphs"):
        graphs.capture(lambda: None)
    assert chip.graphs(chip.device(3)) is None
    kept.pop()
    assert chip.graphs(chip.device(3)) is not None
    chip.device(0)
