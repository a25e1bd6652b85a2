"""Which class serves which `model_type`. Adding a family: one file here and one line in `ARCHITECTURES`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.errors import unknown_name
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.decoder import Decoder
from ssd_ascend.layers.embedding import VocabHead
from ssd_ascend.registry import Registry


class CausalLM(Protocol):
    """A target or draft model. The caller calls `ctx.attention.plan(batch.attention)` before each forward."""

    model: Decoder
    lm_head: VocabHead

    def __call__(self, batch: ForwardBatch, kv: Sequence[torch.Tensor]) -> ModelOutput:
        """kv: one cache tensor per layer. Logits and hidden for `batch.logits_rows`, features for every token."""
        ...


class CausalLMClass(Protocol):
    """How every family is built. `max_positions`: how many positions the rotary table must cover."""

    def __call__(
        self, config: ModelConfig, ctx: BuildContext, *, capture_layers: tuple[int, ...] = (), max_positions: int
    ) -> CausalLM: ...


ARCHITECTURES: Registry[CausalLMClass] = Registry(
    "model family",
    {
        "llama": "ssd_ascend.architectures.llama:LlamaForCausalLM",
        "mistral": "ssd_ascend.architectures.llama:LlamaForCausalLM",
        "qwen2": "ssd_ascend.architectures.qwen2:Qwen2ForCausalLM",
        "qwen3": "ssd_ascend.architectures.qwen3:Qwen3ForCausalLM",
        "qwen3_moe": "ssd_ascend.architectures.qwen3_moe:Qwen3MoeForCausalLM",
    },
)


def check_family(family: str, *, where: str) -> None:
    """ConfigError listing the supported families when `family` is none of them."""
    if family not in ARCHITECTURES:
        raise unknown_name("model family", family, ARCHITECTURES, where=where)
