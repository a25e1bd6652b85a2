"""Which target it is, as both ends of a line to a remote speculator say it at hello. Readable, so that a refusal is."""

from __future__ import annotations

from ssd_ascend.config.model import ModelConfig


def identity_of(config: ModelConfig) -> str:
    """Family and shapes. A fine-tune is the same target to a drafter: it is only right less often."""
    chosen = config.experts
    experts = f", {chosen.per_token} of {chosen.count} experts of {chosen.intermediate_size}" if chosen else ""
    return (
        f"{config.family}, {config.num_layers} layers of {config.hidden_size}, {config.num_heads} heads of "
        f"{config.head_dim}, {config.num_kv_heads} for keys, inner {config.intermediate_size}{experts}, "
        f"vocabulary {config.vocab_size}"
    )
