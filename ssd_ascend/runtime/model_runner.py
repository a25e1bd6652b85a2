"""Runs one model on one rank. Role-blind: it does not know whether its model is a target or a draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from ssd_ascend.backends.base import AttentionBackend, Backend, ChoosingOps, CompilingBackend, RankingOps
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.kv.cache import KVCache
from ssd_ascend.layers.moe import is_host_driven
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.graphs import GraphRunner, make_buckets
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.sampler import top_tokens

_log = get_logger(__name__)
_KINDS_OF_PROMPTS = (16, 32, 64, 128, 256, 512, 600)
"""Tokens: on either side of every size at which a kernel changes its tiles."""

Chooser = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Logits [R, V] -> the arg-max of each row, int64 [R], and its value [R]; see `sampler.top_tokens`."""


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

    def capture_graphs(
        self,
        backend: Backend,
        *,
        max_rows: int,
        lookahead: int,
        max_len: int,
        features: torch.Tensor | None = None,
        longest_prompt: int = 0,
    ) -> None:
        """Capture decode steps of up to `max_rows` rows, verify steps of `lookahead` drafts where that is not 0, and
        prompts of up to `longest_prompt` tokens where the device keeps lengths itself.

        `features`: see `GraphRunner`.
        """
        if not backend.capabilities.graphs:
            return
        if isinstance(backend, CompilingBackend):
            with backend.compiling():
                self._meet_kernels(features, max_len)
        if is_host_driven(self.model):
            _log.info("no captured graphs: the host chooses this model's experts, layer by layer")
            return
        choose = chooser(backend)
        self.graphs = GraphRunner(lambda batch: self._judged(batch, choose), self.attention, features)
        buckets = make_buckets(max_rows, lookahead, longest_prompt if backend.capabilities.device_lengths else 0)
        self.graphs.capture(backend, self.device, buckets, block_size=self.block_size, max_len=max_len)

    @torch.inference_mode()
    def _meet_kernels(self, features: torch.Tensor | None, max_len: int) -> None:
        """Prompts of every kind, over nothing: their kernels compile now, not when somebody waits for an answer."""
        for lengths in (*([n] for n in _KINDS_OF_PROMPTS), [1, _KINDS_OF_PROMPTS[-1]]):
            sizes = [size for n in lengths for size in _portions(n, max_len)]
            rows = [Row([0] * n, 0, [0] * -(-n // self.block_size), 1) for n in sizes]
            hidden = None if features is None else features.new_zeros(sum(sizes), features.shape[-1])
            batch = build_batch(
                Mode.PREFILL, rows, block_size=self.block_size, device=self.device, hidden_states=hidden
            )
            batch.attention.slot_mapping.fill_(-1)  # nothing is stored
            self.run(batch)

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""
        return self.kv.block_size

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """Run the batch; captured features are kept beside the KV entries of their tokens."""
        if not torch.is_inference_mode_enabled():  # as the step loop is, where entering again would cost
            with torch.inference_mode():
                return self.forward(batch)
        output = self.graphs.replay(batch) if self.graphs is not None else None
        return self.run(batch) if output is None else output

    def run(self, batch: ForwardBatch) -> ModelOutput:
        """The forward itself, launch by launch; what a graph captures. Call it in inference mode."""
        self.attention.plan(batch.attention)
        output = self.model(batch, self.kv.layers)
        if output.features is not None and self.kv.features is not None:
            self.kv.store_features(batch.attention.slot_mapping, output.features)
        return output

    def _judged(self, batch: ForwardBatch, choose: Chooser) -> ModelOutput:
        """The forward, and what greedy requests want to know of it."""
        output = self.run(batch)
        token, value = choose(output.logits)
        fed = batch.input_ids if batch.logits_rows is None else batch.input_ids.index_select(0, batch.logits_rows)
        greedy = torch.stack((torch.where(torch.isfinite(value), token, -1), fed), dim=1)
        return replace(output, greedy=greedy)


def chooser(backend: Backend) -> Chooser:
    """How this device finds the arg-max of logits."""
    return backend.ops.top_tokens if isinstance(backend.ops, ChoosingOps) else top_tokens


def ranker(backend: Backend) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """How this device finds the few likeliest tokens of each row of logits, best first."""
    if isinstance(backend.ops, RankingOps):
        return backend.ops.top_few
    return lambda logits, count: logits.topk(count, dim=-1).indices


def _portions(count: int, most: int) -> list[int]:
    """`count` in parts of at most `most`: where sequences are short, a prompt of that size is several of theirs."""
    return [most] * (count // most) + ([count % most] if count % most else [])
