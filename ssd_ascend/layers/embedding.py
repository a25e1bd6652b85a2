"""Token embedding and its mirror image, the vocabulary head; both split over ranks by vocabulary rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.linear import ALL, Assembly
from ssd_ascend.layers.sharding import length, padded_shard
from ssd_ascend.layers.slots import Slot


class VocabEmbedding(nn.Module):
    """ids int64 [T] -> [T, H]. Each rank looks up its own rows and the ranks add up."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.ctx = ctx
        self.shape = (vocab_size, hidden_size)
        self.rows, self._padded_rows = padded_shard(vocab_size, ctx.collectives)
        self.weight: torch.Tensor | None = None

    def slots(self, path: str) -> Iterator[Slot]:
        """The table."""
        if self.weight is None:
            yield Slot(f"{path}.weight", self.shape, self._take)

    def _take(self, tensor: torch.Tensor) -> None:
        shape = (self._padded_rows, self.shape[1])
        table = torch.empty(shape, dtype=self.ctx.dtype, device=self.ctx.device)
        table[: length(self.rows)].copy_(tensor[self.rows])
        table[length(self.rows) :].zero_()
        self.weight = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        assert self.weight is not None
        if self.ctx.collectives.size == 1:
            return self.ctx.ops.embedding(self.weight, ids).to(self.ctx.activation_dtype)
        local = ids - self.rows.start
        ours = (local >= 0) & (local < length(self.rows))
        found = self.ctx.ops.embedding(self.weight, torch.where(ours, local, 0))
        return self.ctx.collectives.all_reduce(found * ours.unsqueeze(-1)).to(self.ctx.activation_dtype)


class VocabHead(nn.Module):
    """[R, H] -> logits [R, V] in float32, whole on every rank.

    Give `tied_to` when the checkpoint has no head of its own: then the embedding's rows serve as one.
    """

    def __init__(
        self, ctx: BuildContext, vocab_size: int, hidden_size: int, *, tied_to: VocabEmbedding | None = None
    ) -> None:
        super().__init__()
        self.ctx = ctx
        self.shape = (vocab_size, hidden_size)
        self._tied_to = (tied_to,) if tied_to is not None else ()  # a tuple, so that it is not our submodule
        self._rows, padded_rows = padded_shard(vocab_size, ctx.collectives)
        self._padding = padded_rows - length(self._rows)
        self._assembly = Assembly(
            ctx, padded_rows, hidden_size, bias=False, prepare=lambda weight, bias: ctx.ops.vocab_head(weight)
        )

    def slots(self, path: str) -> Iterator[Slot]:
        """The matrix, unless it is the embedding's."""
        if not self._tied_to and not self._assembly.complete:
            yield Slot(f"{path}.weight", self.shape, self._take)

    def _take(self, tensor: torch.Tensor) -> None:
        if self._padding:
            self._assembly.take_weight(length(self._rows), ALL, ALL, tensor.new_zeros(self._padding, self.shape[1]))
        self._assembly.take_weight(0, self._rows, ALL, tensor)

    def finish_loading(self) -> None:
        """A tied head hands the embedding's own table to the device, which need not copy it."""
        for embedding in self._tied_to:
            assert embedding.weight is not None
            if not self._assembly.complete:
                self._assembly.adopt(embedding.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V]."""
        logits = self._assembly.linear(x)
        if self.ctx.collectives.size == 1:
            return logits
        return self.ctx.collectives.all_gather(logits, dim=-1)[:, : self.shape[0]]
