"""A chain as one captured graph: catch up, take the arg-max, feed it, K times; the host sends numbers once.

For greedy rows on devices whose attention reads lengths from device memory, or takes them anew for each step of a
graph. Elsewhere, and for all other rows, every step replays by itself (`ModelRunner.graphs`). Used by `paged.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial
from typing import NamedTuple

import torch

from ssd_ascend.backends.base import Graph, GraphCapture, StepwiseAttention
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import Mode, ModelOutput
from ssd_ascend.runtime.refusals import Refusals
from ssd_ascend.runtime.static import ahead_batch, ahead_fields, write_ahead
from ssd_ascend.speculation.drafters.feed import DraftParts, Feed, FeedSize, StaticFeed, feed_sizes


class Rolled(NamedTuple):
    """tokens: int64 [R, K], target vocabulary. hidden: [R, K, H], see `Chain.hidden`, or None."""

    tokens: torch.Tensor
    hidden: torch.Tensor | None


def roll(
    parts: DraftParts,
    output: ModelOutput,
    steps: int,
    forward: Callable[[int, torch.Tensor, torch.Tensor | None], ModelOutput],
    token: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Rolled:
    """Take the arg-max of `output`, feed it with `forward(step, tokens, hidden)`, and again, `steps` times in all.

    token: takes it instead of `parts.token`."""
    take = parts.token if token is None else token
    tokens: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    for step in range(steps):
        own = output.hidden if parts.table is not None else None
        if step:
            output = forward(step - 1, tokens[-1], own)
            own = output.hidden if parts.table is not None else None
        tokens.append(take(output.logits))
        if own is not None:
            hidden.append(own)
    return Rolled(torch.stack(tokens, dim=1), torch.stack(hidden, dim=1) if hidden else None)


class _Chain:
    """One size: its inputs, and what the captured call put out."""

    def __init__(self, parts: DraftParts, size: FeedSize, lookahead: int) -> None:
        self._parts = parts
        self._lookahead = lookahead
        self.feed = StaticFeed(parts, size, more=ahead_fields(size.rows, lookahead - 1))
        self._out: list[Rolled] = []
        self._graph: Graph | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Record it."""
        self._graph = graphs.capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        parts, pack = self._parts, self.feed.pack
        last = (pack.device["query_start"][1:] - 1).clamp(min=0).to(torch.int64)  # a padded row repeats the last one
        output = parts.runner.run(self.feed.batch(Mode.DECODE, last))

        def forward(step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ModelOutput:
            return parts.runner.run(ahead_batch(pack, step, tokens, hidden, max_len=parts.max_len))

        self._out[:] = [roll(parts, output, self._lookahead, forward)]

    def replay(self, feeds: Rows[Feed]) -> Rolled:
        """Run it for these; what it gives holds until the next replay."""
        assert self._graph is not None
        write_ahead(self.feed.fill(feeds), len(feeds), self._parts.runner.block_size)
        self.feed.pack.send()
        self._replan(feeds)
        self._graph.replay()
        tokens, hidden = self._out[0]
        return Rolled(tokens[: len(feeds)], None if hidden is None else hidden[: len(feeds)])

    def _replan(self, feeds: Rows[Feed]) -> None:
        """Where lengths are the host's: those of the catch-up, then one token more for each step."""
        attention = self._parts.runner.attention
        if not isinstance(attention, StepwiseAttention):
            return
        self.feed.replan(feeds)
        device, count = self.feed.pack.device, len(feeds)
        ends = [feed.row.start + len(feed.row.tokens) for feed in feeds]
        for step in range(self._lookahead - 1):
            ahead = AttentionMetadata(
                [1] * count, [end + step + 1 for end in ends], device["ahead_start"], device["ahead_kv_lens"][step],
                device["table"], device["ahead_slots"][step],
            )  # fmt: skip
            attention.replan_step(ahead, self.feed.size.rows, step + 1)


class CapturedChains:
    """Chains of `lookahead` tokens for up to `max_rows` sequences of up to `per_row` entries to catch up with."""

    def __init__(self, parts: DraftParts, graphs: GraphCapture, *, lookahead: int, max_rows: int, per_row: int) -> None:
        """Captures; what the device refuses takes a larger chain or goes step by step, and a line says so."""
        self.lookahead, self.catch_up = lookahead, per_row
        refusals = Refusals()

        def captured(size: FeedSize) -> _Chain:
            chain = _Chain(parts, size, lookahead)
            chain.capture(graphs)
            return chain

        chains = [refusals.attempt(str(size.rows), partial(captured, size)) for size in feed_sizes(max_rows, per_row)]
        self._chains = [chain for chain in reversed(chains) if chain is not None]
        refusals.tell("chains of rows", "take a larger one, or go step by step")

    def __len__(self) -> int:
        """Graphs held."""
        return len(self._chains)

    def run(self, feeds: Rows[Feed]) -> Rolled | None:
        """The chains after these entries; None when no size holds them. Good until the next call."""
        wanted = FeedSize.of(feeds)
        for chain in self._chains:
            if chain.feed.size.holds(wanted):
                return chain.replay(feeds)
        return None
