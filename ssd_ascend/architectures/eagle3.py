"""The EAGLE-3 head (https://arxiv.org/abs/2503.01840): one decoder layer that reads a token and a feature.

Entry i pairs token t_{i+1} with feature g_i and predicts t_{i+2}. g_i is `combine(target features of position i)`, or,
where the target has not been yet, the head's own output `ModelOutput.hidden` of the entry before. Used by the drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ssd_ascend.config.eagle3 import Eagle3Config
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.layers.attention import Attention
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.embedding import VocabEmbedding, VocabHead
from ssd_ascend.layers.linear import ReplicatedLinear
from ssd_ascend.layers.mlp import GatedMLP
from ssd_ascend.layers.norm import RMSNorm
from ssd_ascend.layers.rotary import rotary_table


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads [normed embedding ; normed feature] and whose residual is the feature."""

    def __init__(self, config: Eagle3Config, ctx: BuildContext, cos_sin: torch.Tensor) -> None:
        super().__init__()
        layer = config.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        q_norm = RMSNorm(ctx, layer.head_dim, eps) if config.qk_norm else None
        k_norm = RMSNorm(ctx, layer.head_dim, eps) if config.qk_norm else None
        self.input_layernorm = RMSNorm(ctx, hidden, eps)
        self.hidden_norm = RMSNorm(ctx, hidden, eps)
        self.self_attn = Attention(layer, ctx, cos_sin, 0, input_size=2 * hidden, q_norm=q_norm, k_norm=k_norm)
        self.post_attention_layernorm = RMSNorm(ctx, hidden, eps)
        self.mlp = GatedMLP(layer, ctx)
        self._norm_before_residual = config.norm_before_residual

    def forward(
        self, embedded: torch.Tensor, feature: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded, feature: [T, d]. Returns the two summands of the output, as `DecoderLayer` does."""
        normed = self.hidden_norm(feature)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        # the next norm may overwrite its residual, and the feature is the caller's
        residual = normed if self._norm_before_residual else feature.clone()
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch, kv), residual)
        return self.mlp(x), residual


class Eagle3Head(nn.Module):
    """The head, with `d2t` int64 [draft_vocab]: the target's id of each draft id.

    `embedding` and `lm_head` are the target's own layers where they can be shared; without them the loader fills ours.
    """

    def __init__(
        self,
        config: Eagle3Config,
        ctx: BuildContext,
        *,
        d2t: torch.Tensor,
        max_positions: int,
        embedding: VocabEmbedding | None = None,
        lm_head: VocabHead | None = None,
    ) -> None:
        super().__init__()
        layer = config.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.d2t = d2t.to(ctx.device)
        chunks = len(config.capture_layers) if config.fc_norm else 0
        self.input_norm = RMSNorm(ctx, config.feature_size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(ctx, config.target_hidden_size, eps) for _ in range(chunks))
        self.fc = ReplicatedLinear(ctx, config.feature_size, hidden, bias=config.fc_bias)
        self.embed_tokens = embedding or VocabEmbedding(ctx, layer.vocab_size, hidden)
        self.midlayer = Eagle3Layer(config, ctx, rotary_table(layer.rope, layer.head_dim, max_positions, ctx.device))
        self.norm = RMSNorm(ctx, hidden, eps)
        self.lm_head = lm_head or VocabHead(ctx, config.draft_vocab_size, hidden)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Target features of the capture layers, [T, n * H_target] -> [T, d]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if len(self.fc_norm):
            chunks = features.split(self.config.target_hidden_size, dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, batch: ForwardBatch, kv: Sequence[torch.Tensor]) -> ModelOutput:
        """batch.input_ids are the tokens t_{i+1}, batch.hidden_states [T, d] the features g_i; kv: one tensor.

        logits: float32 [R, draft_vocab]. hidden: [R, d], what to feed back as the feature of the next entry.
        """
        assert batch.hidden_states is not None, "an EAGLE-3 head reads a feature with every token"
        x, residual = self.midlayer(self.embed_tokens(batch.input_ids), batch.hidden_states, batch, kv[0])
        if batch.logits_rows is not None:
            x, residual = x.index_select(0, batch.logits_rows), residual.index_select(0, batch.logits_rows)
        normed, output = self.norm.add(x, residual)
        logits = self.lm_head(normed if self.config.logits_from_normed else output)
        return ModelOutput(logits.float(), normed if self.config.recycle_normed else output)
