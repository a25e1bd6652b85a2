"""The feed-forward part of a sparse layer: a router sends each token to a few of many experts. Family files build it.

Where a device can run the chosen experts by itself (`ExpertOps`), it does. Elsewhere they run one after the other, each
over the tokens that chose it: the host has to know who chose whom, so such a layer cannot be part of a captured graph,
but it needs nothing of a device that dense models do not. Either way a token's result does not depend, in any bit, on
the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ssd_ascend.backends import base
from ssd_ascend.config.model import ExpertsConfig, ModelConfig
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.linear import ALL, Assembly
from ssd_ascend.layers.mlp import gated
from ssd_ascend.layers.sharding import even_shard, length
from ssd_ascend.layers.slots import Slot


def is_host_driven(model: object) -> bool:
    """Whether a loaded model reads numbers back from the device in the middle of a forward."""
    return isinstance(model, nn.Module) and any(
        isinstance(layer, Experts) and layer.host_driven for layer in model.modules()
    )


def choose(logits: torch.Tensor, experts: ExpertsConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits, float32 [T, E] -> the chosen experts, int64 [T, k], likeliest first, and their weights [T, k]."""
    values, chosen = logits.topk(experts.per_token, dim=-1)
    if experts.normalised:  # of the chosen alone, a softmax is that of all divided by the sum of theirs
        return chosen, values.softmax(-1)
    return chosen, logits.softmax(-1).gather(-1, chosen)


class Sorted(NamedTuple):
    """(token, expert) pairs ordered by expert, on the host.

    tokens: int64 [T * k], the token of each pair. places: int64 [T, k], where each token's pairs lie in that order.
    counts: pairs of each expert.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    counts: list[int]


def sort_pairs(chosen: torch.Tensor, num_experts: int) -> Sorted:
    """`chosen`: int64 [T, k] on the host."""
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return Sorted(order // chosen.shape[1], places.view_as(chosen), pairs.bincount(minlength=num_experts).tolist())


class Router(nn.Module):
    """[T, H] -> float32 [T, E].

    16 bits would round logits into ties, and which of two equals wins is a device's whim.
    """

    def __init__(self, ctx: BuildContext, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self._shape = (num_experts, hidden_size)
        self._assembly = Assembly(
            ctx, num_experts, hidden_size, bias=False, prepare=lambda weight, bias: ctx.ops.vocab_head(weight)
        )

    def slots(self, path: str) -> Iterator[Slot]:
        """Its weight."""
        if not self._assembly.complete:
            yield Slot(f"{path}.weight", self._shape, partial(self._assembly.take_weight, 0, ALL, ALL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> float32 [T, E]."""
        return self._assembly.linear(x)


class Experts(nn.Module):
    """Gated feed-forward parts, split over ranks by their inner size: their answers are parts of a sum over ranks."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.experts is not None, "a dense model has no experts"
        self._ctx = ctx
        self._count, self._inner = config.experts.count, config.experts.intermediate_size
        self._hidden = config.hidden_size
        self._local = even_shard(self._inner, ctx.collectives, what="moe_intermediate_size")
        self._gate_up: torch.Tensor | None = None
        self._down: torch.Tensor | None = None
        self._missing = 3 * self._count
        self._together: base.Experts | None = None
        self._each: list[tuple[base.Linear, base.Linear]] = []

    @property
    def host_driven(self) -> bool:
        """Whether the host has to know who chose whom. Settled when all weights are there."""
        assert self._missing == 0, "nobody can tell before the weights are loaded"
        return self._together is None

    def slots(self, path: str) -> Iterator[Slot]:
        """Three matrices of each expert."""
        if self._missing == 0:
            return
        for expert in range(self._count):
            for half, name in enumerate(("gate_proj", "up_proj")):
                take = partial(self._take_gate_or_up, expert, half)
                yield Slot(f"{path}.{expert}.{name}.weight", (self._inner, self._hidden), take)
            yield Slot(
                f"{path}.{expert}.down_proj.weight", (self._hidden, self._inner), partial(self._take_down, expert)
            )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x: [T, H], chosen: int64 [T, k], on the host where that drives us -> [T, k, H]."""
        if self._together is not None:
            return self._together(x, chosen)
        pairs = sort_pairs(chosen, self._count)
        sent = x.index_select(0, pairs.tokens.to(x.device)).split(pairs.counts)
        answers = [down(gate_up(rows)) for (gate_up, down), rows in zip(self._each, sent, strict=True) if len(rows)]
        return torch.cat(answers).index_select(0, pairs.places.flatten().to(x.device)).view(*chosen.shape, -1)

    def _take_gate_or_up(self, expert: int, half: int, tensor: torch.Tensor) -> None:
        if self._gate_up is None:
            self._gate_up = self._empty(2 * length(self._local), self._hidden)
        self._gate_up[expert].chunk(2)[half].copy_(tensor[self._local])
        self._arrived()

    def _take_down(self, expert: int, tensor: torch.Tensor) -> None:
        if self._down is None:
            self._down = self._empty(self._hidden, length(self._local))
        self._down[expert].copy_(tensor[:, self._local])
        self._arrived()

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(self._count, rows, columns, dtype=self._ctx.dtype, device=self._ctx.device)

    def _arrived(self) -> None:
        """The last piece hands all of it to the device; our copies go."""
        self._missing -= 1
        if self._missing:
            return
        assert self._gate_up is not None
        assert self._down is not None
        ops, prepare = self._ctx.ops, gated(self._ctx.ops)
        if isinstance(ops, base.ExpertOps):
            self._together = ops.experts(self._gate_up, self._down)
        if self._together is None:
            pairs = zip(self._gate_up, self._down, strict=True)
            self._each = [(prepare(gate_up, None), ops.linear(down, None)) for gate_up, down in pairs]
        self._gate_up = self._down = None


class SparseMLP(nn.Module):
    """Weighted sum of the chosen experts' answers: [T, H] -> [T, H]. Every rank holds a part of every expert."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.experts is not None, "a dense model has no experts"
        self._config, self._ranks = config.experts, ctx.collectives
        self.gate = Router(ctx, config.hidden_size, config.experts.count)
        self.experts = Experts(config, ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        logits = self.gate(x)
        chosen, weights = choose(logits.cpu() if self.experts.host_driven else logits, self._config)
        weighted = self.experts(x, chosen) * weights.to(x.device).unsqueeze(-1)  # float32
        total = weighted[:, 0]
        for place in range(1, self._config.per_token):  # one by one: a sum's order must not depend on how many tokens
            total = total + weighted[:, place]
        out = total.to(x.dtype)
        return self._ranks.all_reduce(out) if self._ranks.size > 1 else out
