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

PLAIN = {
    "graph": 1,
    "update task group": LAYERS,
    "aclnnFusedInferAttentionScoreV3": LAYERS,  # inside the updates: none of it is a launch
    "write value": LAYERS,  # each lets the graph pass one layer
    "copy": 2,  # the step's numbers to the device, its verdict back
    "synchronize": 1,  # for the verdict
    "record event": 3,
    "wait for event": 1,  # updates wait for what was queued before
    "synchronize event": 1,  # the host buffer of two steps ago, long free
}
"""A decode step: one launch, one update a layer, two copies, one wait."""


def drafted(updates: int, *, copies: int) -> dict[str, int]:
    """With a chain of drafts, which is one more graph: its own updates, numbers, and buffers."""
    both = LAYERS + updates
    return PLAIN | {
        "graph": 2,
        "update task group": both,
        "aclnnFusedInferAttentionScoreV3": both,
        "write value": both,
        "copy": 2 + copies,
        "aclnnInplaceCopy": copies,  # drafts go into the target's input without the host
        "wait for event": 2,
        "record event": 3 + 2 * copies,
        "synchronize event": 1 + copies,
    }


EXPECTED = {
    (): PLAIN,
    ("sd", "model"): drafted(LAYERS * LOOKAHEAD, copies=2),
    ("sd", "eagle3"): drafted(LOOKAHEAD, copies=1),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("how", list(EXPECTED), ids=lambda how: " ".join(how) or "plain")
def test_a_step_costs_what_it_should(pair: Path, how: tuple[str, ...]) -> None:
    config = speculation(pair, *how, lookahead=LOOKAHEAD) if how else None
    engine = make_engine(pair, config, device="npu", dtype="float16", num_kv_blocks=64, max_num_seqs=4)
    for i, prompt in enumerate(prompts_of([5, 17, 140])):
        engine.submit(EngineRequest(id=i, prompt_token_ids=prompt, sampling=greedy(80)))
    for _ in range(6):
        engine.step()
    costs = []
    for _ in range(4):
        before = settled()
        engine.step()
        after = settled()
        costs.append({name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)})
    engine.close()
    assert costs == [{**EXPECTED[how], "synchronize": 2}] * 4  # the second is ours


def settled() -> dict[str, int]:
    """The counts once torch_npu's queue is empty: Python runs ahead of it."""
    torch.npu.synchronize()
    return emulator.counts()
