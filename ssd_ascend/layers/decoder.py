"""The pre-norm decoder that dense families share. A family file says what its attention is; here the layers run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import ForwardBatch
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.attention import Attention
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.embedding import VocabEmbedding
from ssd_ascend.layers.mlp import GatedMLP
from ssd_ascend.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """Attention and feed-forward (`mlp`, dense by default), each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, attention: Attention, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, ctx) if mlp is None else mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream is x + residual, left unadded so that the next norm can fuse the sum; [T, H] both."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, batch, kv)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class DecoderOutput(NamedTuple):
    """normed, hidden: [R, H] after and before the final norm, for the rows whose logits are wanted.

    features: [T, n * H] the captured residual stream of all tokens, or None.
    """

    normed: torch.Tensor
    hidden: torch.Tensor
    features: torch.Tensor | None


class Decoder(nn.Module):
    """Embedding, layers, final norm.

    capture_layers: id i is the residual stream going *into* layer i (what layer i-1 put out); i == num_layers is what
    the last layer put out, before the final norm. Features are concatenated in the order given.
    """

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, layers: Sequence[DecoderLayer], capture_layers: Sequence[int]
    ) -> None:
        super().__init__()
        _check_capture(capture_layers, len(layers))
        self.embed_tokens = VocabEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self._capture = tuple(capture_layers)

    def forward(self, batch: ForwardBatch, kv: Sequence[torch.Tensor]) -> DecoderOutput:
        """kv: one cache tensor per layer."""
        x, residual = self.embed_tokens(batch.input_ids), None
        captured: dict[int, torch.Tensor] = {}
        for index, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            if index in self._capture:
                captured[index] = _stream(x, residual)
            x, residual = layer(x, residual, batch, layer_kv)
        if len(self.layers) in self._capture:
            captured[len(self.layers)] = _stream(x, residual)
        features = torch.cat([captured[index] for index in self._capture], dim=-1) if captured else None
        assert residual is not None  # there is at least one layer
        if batch.logits_rows is not None:
            x, residual = x.index_select(0, batch.logits_rows), residual.index_select(0, batch.logits_rows)
        normed, hidden = self.norm.add(x, residual)
        return DecoderOutput(normed, hidden, features)


def _stream(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The residual stream as a tensor of its own: the next norm may overwrite `residual`."""
    return x.clone() if residual is None else x + residual


def _check_capture(capture_layers: Sequence[int], num_layers: int) -> None:
    for index in capture_layers:
        if not 0 <= index <= num_layers:
            raise ConfigError(
                f"capture layer {index} does not exist: the model has {num_layers} layers, so 0..{num_layers} do",
                remedy="use a head that was trained for this target",
            )
