"""Runs one model on one rank. Role-blind: it does not know whether its model is a target or a draft."""

from __future__ import annotations

from typing import Protocol

import torch

from ssd_ascend.backends.base import AttentionBackend
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.kv.cache import KVCache


class Model(Protocol):
    """What every architecture is to the runtime."""

    def __call__(self, batch: ForwardBatch, kv: tuple[torch.Tensor, ...]) -> ModelOutput:
        """One forward over the layers' KV tensors."""
        ...


class ModelRunner:
    """A model, its KV cache and its attention: all that a forward needs beside the batch."""

    def __init__(self, model: Model, kv: KVCache, attention: AttentionBackend, device: torch.device) -> None:
        self.model = model
        self.kv = kv
        self.attention = attention
        self.device = device

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""
        return self.kv.block_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """Run the batch; captured features are kept beside the KV entries of their tokens."""
        self.attention.plan(batch.attention)
        output = self.model(batch, self.kv.layers)
        if output.features is not None and self.kv.features is not None:
            self.kv.store_features(batch.attention.slot_mapping, output.features)
        return output
