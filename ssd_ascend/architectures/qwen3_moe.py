"""Qwen3, sparse (30B-A3B, 235B-A22B): Qwen3 with feed-forward parts that are chosen token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.attention import Attention
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.decoder import Decoder, DecoderLayer
from ssd_ascend.layers.embedding import VocabHead
from ssd_ascend.layers.moe import SparseMLP
from ssd_ascend.layers.norm import RMSNorm
from ssd_ascend.layers.rotary import rotary_table


class Qwen3MoeForCausalLM(nn.Module):
    """The model as its checkpoint names it: `model` and `lm_head`."""

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, *, capture_layers: tuple[int, ...] = (), max_positions: int
    ) -> None:
        super().__init__()
        if config.experts is None:
            raise ConfigError("a qwen3_moe without 'num_experts'", remedy="use the config.json the model came with")
        dense = config.experts.dense_layers
        cos_sin = rotary_table(config.rope, config.head_dim, max_positions, ctx.device)

        def layer(index: int) -> DecoderLayer:
            q_norm, k_norm = (RMSNorm(ctx, config.head_dim, config.rms_norm_eps) for _ in range(2))
            attention = Attention(config, ctx, cos_sin, index, q_norm=q_norm, k_norm=k_norm)
            return DecoderLayer(config, ctx, attention, None if index in dense else SparseMLP(config, ctx))

        self.model = Decoder(config, ctx, [layer(index) for index in range(config.num_layers)], capture_layers)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = VocabHead(ctx, config.vocab_size, config.hidden_size, tied_to=tied)

    def forward(self, batch: ForwardBatch, kv: Sequence[torch.Tensor]) -> ModelOutput:
        """kv: one cache tensor per layer."""
        output = self.model(batch, kv)
        return ModelOutput(self.lm_head(output.normed), output.hidden, output.features)
