"""Runs one model on one rank. Role-blind: it does not know whether its model is a target or a draft."""

from __future__ import annotations

from typing import Protocol

import torch

from ssd_ascend.backends.base import AttentionBackend, Backend
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.kv.cache import KVCache
from ssd_ascend.runtime.graphs import GraphRunner, make_buckets


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
        self.graphs: GraphRunner | None = None

    def capture_graphs(self, backend: Backend, *, max_rows: int, lookahead: int, max_len: int) -> None:
        """Capture decode steps of up to `max_rows` rows, and verify steps of `lookahead` drafts where that is not 0."""
        if not backend.capabilities.graphs:
            return
        self.graphs = GraphRunner(self._run, self.attention)
        self.graphs.capture(
            backend, self.device, make_buckets(max_rows, lookahead), block_size=self.block_size, max_len=max_len
        )

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""
        return self.kv.block_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """Run the batch; captured features are kept beside the KV entries of their tokens."""
        output = self.graphs.replay(batch) if self.graphs is not None else None
        if output is None:
            output = self._run(batch)
        if output.features is not None and self.kv.features is not None:
            slots = batch.attention.slot_mapping[: output.features.shape[0]]
            self.kv.store_features(slots, output.features)
        return output

    def _run(self, batch: ForwardBatch) -> ModelOutput:
        self.attention.plan(batch.attention)
        return self.model(batch, self.kv.layers)
