"""A worker's rehearsal reaches all that serving needs, and leaves a drafter as if nothing had been said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.speculation.base import DraftSequence
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.fallback import FallbackPolicy
from ssd_ascend.speculation.fan_out import make_fan_out
from ssd_ascend.speculation.registry import DRAFTERS
from ssd_ascend.speculation.rehearsal import rehearse
from ssd_ascend.transport.base import Transport
from tests.engine.harness import make_engine, speculation, write_pair

LOOKAHEAD = 3


class Noted:
    """A drafter, and what was asked of it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[str] = []
        self.rows: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def chain(self, seqs: list[DraftSequence], lookahead: int) -> Any:
        self.calls.append("chain")
        return self._inner.chain(seqs, lookahead)

    def glue(self, seqs: list[DraftSequence], *rest: Any) -> Any:
        self.calls.append("glue")
        self.rows.add(len(seqs))
        return self._inner.glue(seqs, *rest)

    def foresee(self, seqs: list[DraftSequence], *rest: Any, **given: Any) -> Any:
        found = self._inner.foresee(seqs, *rest, **given)
        if found is not None:  # the whole round at once
            self.calls += ["glue", "branch"]
            self.rows.add(len(seqs))
        return found

    def branch(self, branches: Any, *rest: Any) -> Any:
        self.calls.append("branch")
        return self._inner.branch(branches, *rest)


@pytest.mark.parametrize("kind", DRAFTERS.names())
@pytest.mark.parametrize(("max_len", "crowd"), [(256, 0), (20, 0), (3, 0), (256, 5), (20, 5), (3, 5)])
def test_a_rehearsal_uses_every_part_and_gives_everything_back(
    tmp_path: Path, kind: str, max_len: int, crowd: int
) -> None:
    pair = write_pair(tmp_path, "llama")
    engine = make_engine(pair, speculation(pair, "sd", kind, lookahead=LOOKAHEAD), graphs=False)
    try:
        drafter = Noted(engine._speculator._drafter)  # type: ignore[attr-defined]
        width = engine._speculator._features.features.shape[-1] if drafter.wants_features else 0  # type: ignore[attr-defined]

        def worker(line: Transport) -> DraftWorker:
            return DraftWorker(
                drafter, line, lookahead=LOOKAHEAD, fan_out=make_fan_out(2, LOOKAHEAD), fallback=FallbackPolicy("auto")
            )

        with torch.inference_mode():
            rehearse(worker, max_len=max_len, feature_width=width, feature_dtype=torch.float32, crowd=crowd)
        if max_len > 3:
            assert {"glue", "branch"} <= set(drafter.calls)
            assert drafter.rows == {1, 2, *([crowd] if crowd else [])}
        blocks = getattr(drafter, "_blocks", None)
        assert blocks is None or blocks.num_used == 0
    finally:
        engine.close()
