"""A trained head as a directory that this engine, vLLM and SGLang load: standard names, offsets in d2t, a card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ssd_ascend.config.model import RopeConfig
from ssd_ascend.errors import ConfigError
from ssd_ascend.training.head import HeadShape, Weights
from ssd_ascend.training.run_folder import replace_text, writing
from ssd_ascend.training.vocabulary import DraftVocabulary

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


def export(out: Path, weights: Weights, shape: HeadShape, vocabulary: DraftVocabulary, *, dtype: torch.dtype) -> None:
    """Write weights and config; the folder may hold other things."""
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    tensors |= {name: table.cpu() for name, table in vocabulary.tables().items()}
    part = out / f"{WEIGHTS}.part"
    with writing(out / WEIGHTS):
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors writes for its owner only
        part.replace(out / WEIGHTS)
    replace_text(out / CONFIG, json.dumps(head_config(shape, dtype), indent=2))


def head_config(shape: HeadShape, dtype: torch.dtype) -> dict[str, Any]:
    """As SpecForge writes it. Layer ids are of layers whose *output* is taken, one less than the inputs we count."""
    target = shape.target
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        **_rope(target.rope),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": target.hidden_size,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [index - 1 for index in shape.capture_layers],
        },
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """The target's rotation: the head learned with it."""
    if rope.frequency_factors is not None:
        raise ConfigError(
            "the target spells its rope scaling as a table of factors, which no head's config can hold",
            remedy="train from the model's own directory instead of its .gguf",
        )
    scaling: dict[str, Any] | None = None
    if rope.type != "default":
        scaling = {"rope_type": rope.type, "factor": rope.factor,
                   "original_max_position_embeddings": rope.original_max_positions}  # fmt: skip
    if rope.type == "llama3" and scaling is not None:
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn" and scaling is not None:
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "attention_factor": rope.attention_factor,
        }
        scaling |= {name: value for name, value in optional.items() if value is not None}
    return {"rope_theta": rope.theta, "partial_rotary_factor": rope.partial_factor, "rope_scaling": scaling}


def write_card(out: Path, facts: Mapping[str, Any]) -> None:
    """README.md: what the head is, what it was made from, how well it drafts."""
    lines = [
        f"# EAGLE-3 head for {facts['target']}",
        "",
        f"{facts['parameters'] / 1e6:.1f} M parameters in {facts['dtype']}, draft vocabulary {facts['draft_vocab']} "
        f"({facts['covered']:.1%} of the tokens of its training answers). Made with `{facts['command']}`.",
        "",
        f"- **Data**: {facts['data']}.",
        f"- **Training**: {facts['steps']} steps of {facts['batch_tokens']} tokens, unrolled {facts['unroll']} deep, "
        f"{facts['seconds']:.0f} s on {facts['device']}, {facts['tokens_per_s']:,} token visits a second.",
        f"- **Licence**: {facts['licence']}.",
        "",
        "Held-out text, right guesses by step of self-conditioning: "
        + ", ".join(f"{share:.3f}" for share in facts["by_depth"])
        + f". Tokens per round at lookahead 5, greedy: {facts['tokens_per_round']:.2f}.",
    ]
    replace_text(out / CARD, "\n".join(lines))
