"""Qwen3, dense: Llama with queries and keys normalised per head before the rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.layers.attention import Attention
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.decoder import Decoder, DecoderLayer
from ssd_ascend.layers.embedding import VocabHead
from ssd_ascend.layers.norm import RMSNorm
from ssd_ascend.layers.rotary import rotary_table


class Qwen3ForCausalLM(nn.Module):
    """The model as its checkpoint names it: `model` and `lm_head`."""

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, *, capture_layers: tuple[int, ...] = (), max_positions: int
    ) -> None:
        super().__init__()
        cos_sin = rotary_table(config.rope, config.head_dim, max_positions, ctx.device)

        def attention(layer: int) -> Attention:
            q_norm, k_norm = (RMSNorm(ctx, config.head_dim, config.rms_norm_eps) for _ in range(2))
            return Attention(config, ctx, cos_sin, layer, q_norm=q_norm, k_norm=k_norm)

        layers = [DecoderLayer(config, ctx, attention(layer)) for layer in range(config.num_layers)]
        self.model = Decoder(config, ctx, layers, capture_layers)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = VocabHead(ctx, config.vocab_size, config.hidden_size, tied_to=tied)

    def forward(self, batch: ForwardBatch, kv: Sequence[torch.Tensor]) -> ModelOutput:
        """kv: one cache tensor per layer."""
        output = self.model(batch, kv)
        return ModelOutput(self.lm_head(output.normed), output.hidden, output.features)
