"""The gated feed-forward part of a layer."""

from __future__ import annotations

import torch
from torch import nn

from ssd_ascend.backends.base import GatedOps, Linear, Ops
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.linear import PackedLinear, Prepare, RowLinear, column_part
from ssd_ascend.layers.sharding import even_shard


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, H] -> [T, H]."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = PackedLinear(
            ctx,
            hidden,
            [column_part("gate_proj", inner, ctx), column_part("up_proj", inner, ctx)],
            bias=config.mlp_bias,
            prepare=gated(ctx.ops),
        )
        columns = even_shard(inner, ctx.collectives, what="intermediate_size")
        self.down_proj = RowLinear(ctx, inner, columns, hidden, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(self.gate_up_proj(x))


def gated(ops: Ops) -> Prepare:
    """Projection and activation together, in one launch where the device has that."""
    if isinstance(ops, GatedOps):
        return ops.gated_linear

    def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        project = ops.linear(weight, bias)
        return lambda x: ops.silu_and_mul(project(x))

    return prepare
