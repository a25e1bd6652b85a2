"""Self-attention of one layer: packed projections, rotary, the backend's paged attention, output projection."""

from __future__ import annotations

import torch
from torch import nn

from ssd_ascend.backends.base import AttentionSpec, Collectives, RotatingAttention
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import ForwardBatch
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.linear import PackedLinear, Part, RowLinear
from ssd_ascend.layers.norm import RMSNorm
from ssd_ascend.layers.sharding import even_shard, kv_head_shard, length, scaled


def attention_spec(
    config: ModelConfig, collectives: Collectives, *, block_size: int, dtype: torch.dtype
) -> AttentionSpec:
    """What `Backend.attention` needs to know of a model on this rank; ConfigError when the ranks cannot share it."""
    return AttentionSpec(
        num_layers=config.num_layers,
        num_heads=length(even_shard(config.num_heads, collectives, what="the number of attention heads")),
        num_kv_heads=length(kv_head_shard(config.num_kv_heads, collectives)),
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=config.attention_scale,
    )


class Attention(nn.Module):
    """[T, input_size] -> [T, H]. `q_norm` and `k_norm` act per head before the rotation, where a family has them.

    `input_size` differs from the hidden size in EAGLE-3 heads only, which read two vectors a token; `output_bias` from
    the config's `attention_bias` in families that have a bias on one side only.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        cos_sin: torch.Tensor,
        layer: int,
        *,
        input_size: int | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        output_bias: bool | None = None,
    ) -> None:
        super().__init__()
        head_dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        q_rows = scaled(even_shard(heads, ctx.collectives, what="the number of attention heads"), head_dim)
        kv_rows = scaled(kv_head_shard(kv_heads, ctx.collectives), head_dim)
        self._ctx = ctx
        self._layer = layer
        self._cos_sin = cos_sin
        self._head_dim = head_dim
        self._heads = [length(rows) // head_dim for rows in (q_rows, kv_rows, kv_rows)]
        self.qkv_proj = PackedLinear(
            ctx,
            input_size or config.hidden_size,
            [
                Part("q_proj", heads * head_dim, q_rows),
                Part("k_proj", kv_heads * head_dim, kv_rows),
                Part("v_proj", kv_heads * head_dim, kv_rows),
            ],
            bias=config.attention_bias,
        )
        if output_bias is None:
            output_bias = config.attention_bias
        self.o_proj = RowLinear(ctx, heads * head_dim, q_rows, config.hidden_size, bias=output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        # asked once: looking through a protocol takes longer than a small operator
        self._rotating = ctx.attention if isinstance(ctx.attention, RotatingAttention) else None

    def forward(self, x: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        """x: [T, input_size]; kv: this layer's cache. Writes the keys and values of the batch into it."""
        q, k, v = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim).split(self._heads, dim=1)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self.o_proj(self._attend(q, k, v, batch, kv))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        """Rotate, store and attend; [T, heads, D] each -> [T, Hq * D]."""
        if self._rotating is not None:
            return self._rotating.forward_rotated(
                q, k, v, batch.positions, self._cos_sin, kv, batch.attention, self._layer
            )
        q, k = self._ctx.ops.rotary(q, k, batch.positions, self._cos_sin)
        return self._ctx.attention.forward(q, k, v, kv, batch.attention, self._layer)
