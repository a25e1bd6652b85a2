"""What a step of a whole engine costs the emulated device once it runs, call by call: nothing may be added unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd_ascend.backends.npu import emulator
from ssd_ascend.core.request import EngineRequest
from tests.engine.harness import greedy, make_engine, prompts_of, speculation, write_pair

LAYERS, LOOKAHEAD = 4, 4

pytestmark = pytest.mark.usefixtures("backend")

REPLAYED = {"graph", "update task group", "aclnnFusedInferAttentionScoreV3", "write value"}
"""What a graph and its updates are: none of it is a call beside them."""
EVENTS = {"record event", "query event"}
"""One of them in a step: host buffers are guarded in pairs. A query asks, nobody waits."""

PLAIN = {
    "graph": 1,
    "update task group": LAYERS,
    "aclnnFusedInferAttentionScoreV3": LAYERS,  # inside the updates: none of it is a launch
    "write value": LAYERS,  # each lets the graph pass one layer
    "copy": 2,  # the step's numbers to the device, its verdict back
    "synchronize": 1,  # for the verdict
}
"""A decode step: one launch, one update a layer, two copies, one wait."""


def drafted(updates: int, *, copies: int, waits: int = 0) -> dict[str, int]:
    """With a chain of drafts, which is one more graph: its own updates, numbers, and buffers."""
    both = LAYERS + updates
    return PLAIN | {
        "graph": 2,
        "update task group": both,
        "aclnnFusedInferAttentionScoreV3": both,
        "write value": both,
        "copy": 2 + copies,
        "aclnnInplaceCopy": copies,  # drafts go into the target's input without the host
        **({"synchronize event": waits} if waits else {}),  # for the last round's drafts, long there
    }


EXPECTED = {
    (): PLAIN,
    ("sd", "model"): drafted(LAYERS * LOOKAHEAD, copies=2, waits=1),
    ("sd", "eagle3"): drafted(LOOKAHEAD, copies=1),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("llama"), "llama")


def costs(pair: Path, how: tuple[str, ...], steps: int) -> list[dict[str, int]]:
    """What each of so many steps costs, once the engine runs."""
    config = speculation(pair, *how, lookahead=LOOKAHEAD) if how else None
    engine = make_engine(pair, config, device="npu", dtype="float16", num_kv_blocks=64, max_num_seqs=4)
    for i, prompt in enumerate(prompts_of([5, 17, 140])):
        engine.submit(EngineRequest(id=i, prompt_token_ids=prompt, sampling=greedy(80)))
    for _ in range(6):
        engine.step()
    found = []
    for _ in range(steps):
        before = settled()
        engine.step()
        after = settled()
        spent = {name: n - before.get(name, 0) for name, n in after.items()}
        spent["synchronize"] -= 1  # ours
        found.append({name: n for name, n in spent.items() if n})
    engine.close()
    return found


@pytest.mark.parametrize("how", list(EXPECTED), ids=lambda how: " ".join(how) or "plain")
def test_a_step_costs_what_it_should(pair: Path, how: tuple[str, ...]) -> None:
    found = costs(pair, how, 4)
    assert [{name: n for name, n in spent.items() if name not in EVENTS} for spent in found] == [EXPECTED[how]] * 4


def test_beside_its_graph_and_updates_a_decode_step_makes_four_calls(pair: Path) -> None:
    for spent in costs(pair, (), 8):
        assert sum(n for name, n in spent.items() if name not in REPLAYED) <= 4, spent


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_step_beside_a_worker_launches_graphs_and_waits_for_no_memory(pair: Path, drafter: str) -> None:
    """The worker lives in this process, so its round is counted, too: two graphs, three after a miss."""
    moved = {"aclnnInplaceCopy", "aclnnIndexSelect", "aclnnCat"}  # features, from their slots and to the round's graphs
    for spent in costs(pair, ("ssd", drafter), 8):
        assert "pageable copy" not in spent, spent
        assert spent["graph"] in (3, 4), spent
        assert spent.get("synchronous copy", 0) == spent["graph"] - 3, spent  # what a miss is answered with
        launched = {name for name in spent if name.startswith("aclnn")}
        assert launched <= REPLAYED | moved, spent


def settled() -> dict[str, int]:
    """The counts once torch_npu's queue is empty: Python runs ahead of it."""
    torch.npu.synchronize()
    return emulator.counts()
