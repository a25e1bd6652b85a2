"""Qwen2 and Qwen2.5, dense: Llama with biases on queries, keys and values, and none on what attention puts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.layers.attention import Attention
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.decoder import Decoder, DecoderLayer
from ssd_ascend.layers.embedding import VocabHead
from ssd_ascend.layers.rotary import rotary_table


class Qwen2ForCausalLM(nn.Module):
    """The model as its checkpoint names it: `model` and `lm_head`."""

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, *, capture_layers: tuple[int, ...] = (), max_positions: int
    ) -> None:
        super().__init__()
        config = replace(config, attention_bias=True)  # the family has them; its config.json does not say so
        cos_sin = rotary_table(config.rope, config.head_dim, max_positions, ctx.device)
        layers = [
            DecoderLayer(config, ctx, Attention(config, ctx, cos_sin, layer, output_bias=False))
            for layer in range(config.num_layers)
        ]
        self.model = Decoder(config, ctx, layers, capture_layers)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = VocabHead(ctx, config.vocab_size, config.hidden_size, tied_to=tied)

    def forward(self, batch: ForwardBatch, kv: Sequence[torch.Tensor]) -> ModelOutput:
        """kv: one cache tensor per layer."""
        output = self.model(batch, kv)
        return ModelOutput(self.lm_head(output.normed), output.hidden, output.features)
