"""Matrices. Each is assembled from checkpoint tensors, given to the device once (`ops.linear`), never kept twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ssd_ascend.backends.base import Linear
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.sharding import even_shard, length
from ssd_ascend.layers.slots import Slot

ALL = slice(None)

Prepare = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Makes a weight and a bias ready for the device: `Ops.linear`, or what else a layer computes from them."""


def _unloaded(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this linear has no weights yet: load the model before its first forward")


class Assembly:
    """A weight [out, in] (and bias [out]) of this rank that arrives in pieces.

    The piece that completes it hands it to the device, which may lay it out anew; our copy goes at that moment, so that
    loading a model never needs more than one layer's weights on top of the loaded ones.
    """

    def __init__(
        self, ctx: BuildContext, out_features: int, in_features: int, *, bias: bool, prepare: Prepare | None = None
    ) -> None:
        self._ctx = ctx
        self._prepare = prepare or ctx.ops.linear
        self._shape = (out_features, in_features)
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._missing_rows = out_features * (2 if bias else 1)
        self.linear: Linear = _unloaded

    @property
    def complete(self) -> bool:
        """Whether the device holds it."""
        return self._missing_rows == 0

    def take_weight(self, row: int, rows: slice, columns: slice, tensor: torch.Tensor) -> None:
        """tensor[rows, columns] of a checkpoint weight are our rows from `row` on."""
        if self._weight is None:
            self._weight = torch.empty(self._shape, dtype=self._ctx.dtype, device=self._ctx.device)
        piece = tensor[rows, columns]
        self._weight[row : row + len(piece)].copy_(piece)
        self._arrived(len(piece))

    def take_bias(self, row: int, rows: slice, tensor: torch.Tensor) -> None:
        """tensor[rows] of a checkpoint bias are our entries from `row` on."""
        if self._bias is None:
            self._bias = torch.empty(self._shape[:1], dtype=self._ctx.dtype, device=self._ctx.device)
        piece = tensor[rows]
        self._bias[row : row + len(piece)].copy_(piece)
        self._arrived(len(piece))

    def adopt(self, weight: torch.Tensor) -> None:
        """Take a whole weight [out, in] that someone else keeps too."""
        self._weight = weight
        self._arrived(len(weight))

    def _arrived(self, rows: int) -> None:
        self._missing_rows -= rows
        if self._missing_rows == 0:
            assert self._weight is not None
            self.linear = self._prepare(self._weight, self._bias)
            self._weight = self._bias = None


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint matrix inside a packed one: its name, its whole number of rows, and the rows this rank keeps."""

    name: str
    rows: int
    local: slice


class PackedLinear(nn.Module):
    """Matrices over the same input as one, split over ranks by rows: [T, in] -> [T, sum of local rows].

    `parts` is the mapping to the checkpoint: part `q_proj` of `self_attn.qkv_proj` is `self_attn.q_proj.weight`.
    """

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__()
        self._in_features = in_features
        self._parts = tuple(parts)
        self._bias = bias
        self._assembly = Assembly(
            ctx, sum(length(part.local) for part in parts), in_features, bias=bias, prepare=prepare
        )

    def slots(self, path: str) -> Iterator[Slot]:
        """Weight, and bias if any, of every part; a part is named as a sibling of this layer."""
        if self._assembly.complete:
            return
        parent, dot, _ = path.rpartition(".")
        row = 0
        for part in self._parts:
            name = f"{parent}{dot}{part.name}"
            take_weight = partial(self._assembly.take_weight, row, part.local, ALL)
            yield Slot(f"{name}.weight", (part.rows, self._in_features), take_weight)
            if self._bias:
                yield Slot(f"{name}.bias", (part.rows,), partial(self._assembly.take_bias, row, part.local))
            row += length(part.local)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, local out]."""
        return self._assembly.linear(x)


class RowLinear(nn.Module):
    """A matrix split over ranks by input columns, results summed: [T, local in] -> [T, out]."""

    def __init__(self, ctx: BuildContext, in_features: int, columns: slice, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self._ranks = ctx.collectives
        self._shape = (out_features, in_features)
        self._columns = columns
        self._bias = bias
        # the sum over ranks must hold the bias once
        self._assembly = Assembly(ctx, out_features, length(columns), bias=bias and self._ranks.rank == 0)

    def slots(self, path: str) -> Iterator[Slot]:
        """Weight, and bias if any (of which only rank 0 keeps anything)."""
        if self._assembly.complete:
            return
        yield Slot(f"{path}.weight", self._shape, partial(self._assembly.take_weight, 0, ALL, self._columns))
        if self._bias:
            take = partial(self._assembly.take_bias, 0, ALL) if self._ranks.rank == 0 else _drop
            yield Slot(f"{path}.bias", self._shape[:1], take)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, local in] -> [T, out]."""
        out = self._assembly.linear(x)
        return out if self._ranks.size == 1 else self._ranks.all_reduce(out)


class ReplicatedLinear(nn.Module):
    """A matrix that every rank holds whole: [T, in] -> [T, out]."""

    def __init__(self, ctx: BuildContext, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self._shape = (out_features, in_features)
        self._bias = bias
        self._assembly = Assembly(ctx, out_features, in_features, bias=bias)

    def slots(self, path: str) -> Iterator[Slot]:
        """Weight, and bias if any."""
        if self._assembly.complete:
            return
        yield Slot(f"{path}.weight", self._shape, partial(self._assembly.take_weight, 0, ALL, ALL))
        if self._bias:
            yield Slot(f"{path}.bias", self._shape[:1], partial(self._assembly.take_bias, 0, ALL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return self._assembly.linear(x)


def column_part(name: str, rows: int, ctx: BuildContext) -> Part:
    """A part split evenly by rows."""
    return Part(name, rows, even_shard(rows, ctx.collectives, what=f"the number of rows of {name}"))


def _drop(tensor: torch.Tensor) -> None:
    """Another rank keeps it."""
