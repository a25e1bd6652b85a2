"""The feed-forward part of a sparse layer: a router sends each token to a few of many experts. Family files build it.

The experts run one after the other, each over the tokens that chose it. The host has to know who chose whom, so such a
layer cannot be part of a captured graph; `HostDriven` says so to the runtime. In return it needs nothing of a device
beyond what dense models need, and a token's result does not depend, in any bit, on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from ssd_ascend.config.model import ExpertsConfig, ModelConfig
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.linear import ALL, Assembly
from ssd_ascend.layers.mlp import GatedMLP
from ssd_ascend.layers.slots import Slot


@runtime_checkable
class HostDriven(Protocol):
    """A layer whose work depends on numbers that it reads back from the device in the middle of a forward."""

    host_driven: bool


def is_host_driven(model: object) -> bool:
    """Whether any layer of a model is."""
    return isinstance(model, nn.Module) and any(isinstance(layer, HostDriven) for layer in model.modules())


class Routing(NamedTuple):
    """Who goes where, on the host: (token, expert) pairs ordered by expert.

    tokens: int64 [T * k], the token of each pair. places: int64 [T, k], where a token's pairs lie in that order, the
    likeliest expert's first. weights: float32 [T, k]. counts: pairs of each expert.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor
    counts: list[int]


def route(logits: torch.Tensor, experts: ExpertsConfig) -> Routing:
    """Choose experts by router logits, float32 [T, E] on the host."""
    values, chosen = logits.topk(experts.per_token, dim=-1)
    # of the chosen alone, a softmax is that of all divided by the sum of theirs
    weights = values.softmax(-1) if experts.normalised else logits.softmax(-1).gather(-1, chosen)
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = pairs.bincount(minlength=experts.count).tolist()
    return Routing(order // experts.per_token, places.view_as(chosen), weights, counts)


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


class SparseMLP(nn.Module):
    """Weighted sum of the chosen experts' outputs: [T, H] -> [T, H]. Every rank holds a part of every expert."""

    host_driven = True

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.experts is not None, "a dense model has no experts"
        self._experts, self._ranks = config.experts, ctx.collectives
        self.gate = Router(ctx, config.hidden_size, config.experts.count)
        self.experts = nn.ModuleList(
            GatedMLP(config, ctx, inner=config.experts.intermediate_size, summed=False)
            for _ in range(config.experts.count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        routing = route(self.gate(x).cpu(), self._experts)
        sent = x.index_select(0, routing.tokens.to(x.device)).split(routing.counts)
        answers = torch.cat([expert(rows) for expert, rows in zip(self.experts, sent, strict=True) if len(rows)])
        weights = routing.weights.to(x.device)
        total = answers.index_select(0, routing.places[:, 0].to(x.device)) * weights[:, :1]
        for place in range(1, self._experts.per_token):  # one by one: a sum's order must not depend on how many tokens
            total += answers.index_select(0, routing.places[:, place].to(x.device)) * weights[:, place : place + 1]
        out = total.to(x.dtype)
        return self._ranks.all_reduce(out) if self._ranks.size > 1 else out
