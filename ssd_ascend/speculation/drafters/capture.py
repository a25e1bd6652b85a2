"""What a drafter captures when it is built: single steps wherever there are graphs, whole rounds where lengths may
live on the device or are taken anew for every step. Called by `model.py` and `eagle3.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from ssd_ascend.backends.base import CompilingBackend, GraphCapture, StepwiseAttention
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.advance import advancer
from ssd_ascend.runtime.graphs import Rehearsal, StaticInputs
from ssd_ascend.runtime.model_runner import ModelRunner, chooser, ranker
from ssd_ascend.runtime.refusals import Refusals, rehearsing
from ssd_ascend.speculation.drafters.captured_ahead import Beside, CapturedAhead
from ssd_ascend.speculation.drafters.captured_chain import CapturedChains
from ssd_ascend.speculation.drafters.captured_forks import CapturedForks
from ssd_ascend.speculation.drafters.captured_next import CapturedNext
from ssd_ascend.speculation.drafters.feed import DraftParts, FeatureTable
from ssd_ascend.speculation.fan_out import FixedFanOut, make_fan_out
from ssd_ascend.speculation.setup import DraftSetup

_log = get_logger(__name__)
_MOST_STEP_ROWS = 256


class Captured(NamedTuple):
    """Whole rounds in graphs; None for what this device, or this configuration, does step by step."""

    chains: CapturedChains | None = None
    forks: CapturedForks | None = None
    ahead: CapturedAhead | None = None
    following: CapturedNext | None = None


NOTHING = Captured()


def capture(
    setup: DraftSetup,
    runner: ModelRunner,
    *,
    catch_up: int,
    to_target: torch.Tensor | None,
    table: FeatureTable | None = None,
) -> Captured:
    """Capture for a drafter that usually has up to `catch_up` entries a sequence to compute before it drafts."""
    backend, facts = setup.backend, setup.target
    if not (facts.graphs and backend.capabilities.graphs):
        return NOTHING
    rows = facts.max_num_seqs * (1 if setup.tree_mask else max(1, setup.width))
    features = None if table is None else torch.empty((0, table.hidden_size), dtype=table.dtype, device=setup.device)
    glue = catch_up + (setup.lookahead if setup.width else 0)
    runner.capture_graphs(
        backend,
        max_rows=min(rows, max(_MOST_STEP_ROWS, facts.max_num_seqs)),
        lookahead=glue - 1,
        max_len=setup.max_positions,
        features=features,
        longest_prompt=min(facts.max_batched_tokens, setup.max_positions),
    )
    graphs = None if runner.graphs is None else backend.graphs(setup.device)  # some models do not let it
    lengths = backend.capabilities.device_lengths or isinstance(runner.attention, StepwiseAttention)
    if graphs is None or not (backend.capabilities.padded_graphs and lengths):
        return NOTHING
    vocab = facts.vocab_size if to_target is None else int(to_target.shape[0])
    parts = DraftParts(runner, table, chooser(backend), to_target, setup.max_positions, vocab)
    began = time.monotonic()
    if isinstance(backend, CompilingBackend):
        with backend.compiling(), rehearsing():
            _rounds(setup, parts, Rehearsal(), catch_up)
    captured = _rounds(setup, parts, graphs, catch_up)
    backend.synchronize(setup.device)
    _log.info(
        "captured %d chains and %d parts of rounds in %.1f s",
        *(sum(len(part) for part in kind if part is not None)
          for kind in ((captured.chains, captured.following), (captured.forks, captured.ahead))),
        time.monotonic() - began,
    )  # fmt: skip
    return captured


def _rounds(setup: DraftSetup, parts: DraftParts, graphs: GraphCapture, catch_up: int) -> Captured:
    """All that this device and configuration can have."""
    rows = setup.target.max_num_seqs
    chains = CapturedChains(parts, graphs, lookahead=setup.lookahead, max_rows=rows, per_row=catch_up)
    if setup.verifications is not None:
        return Captured(chains, following=_following(setup, parts, graphs, setup.verifications))
    if not setup.width or setup.config.fan_out == "auto" or setup.config.lookahead == "auto":
        return Captured(chains)  # guesses take the host
    fan_out = make_fan_out(setup.config.fan_out, setup.lookahead)
    assert isinstance(fan_out, FixedFanOut)
    counts = fan_out.per_depth
    rank = ranker(setup.backend)
    beside = Beside(rank, max(counts[:-1])) if _goes_ahead(setup, parts, counts) else None

    def branches() -> tuple[CapturedForks, CapturedAhead | None]:
        forks = CapturedForks(
            parts, graphs,
            lookahead=setup.lookahead, width=setup.width, max_rows=rows, per_row=catch_up, masks=setup.tree_mask,
            rank=rank, beside=beside,
        )  # fmt: skip
        if beside is None:
            return forks, None
        return forks, CapturedAhead(parts, graphs, beside, lookahead=setup.lookahead, counts=counts, max_rows=rows)

    refusals = Refusals()
    captured = refusals.attempt(str(setup.width), branches)
    refusals.tell("rounds of branches", "go step by step")
    return Captured(chains) if captured is None else Captured(chains, *captured)


def _following(
    setup: DraftSetup, parts: DraftParts, graphs: GraphCapture, verifications: StaticInputs
) -> CapturedNext | None:
    """Rounds after verdicts that only the device has; where entries are fed features, those of the target's store."""
    if parts.table is not None and parts.table.store is None:
        return None
    return CapturedNext(parts, graphs, verifications, advancer(setup.backend), lookahead=setup.lookahead)


def _goes_ahead(setup: DraftSetup, parts: DraftParts, counts: Rows[int]) -> bool:
    """Whether a round's guesses may be known before its glue: entries of accepted drafts stay as they are, and there
    are guesses for every kind of depth."""
    return (
        setup.tree_mask
        and parts.table is None
        and parts.to_target is None
        and setup.lookahead > 1
        and min(max(counts[:-1]), counts[-1]) > 0
        and max(*counts[:-1], counts[-1] - 1) + 1 < parts.num_tokens
    )
