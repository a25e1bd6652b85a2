"""A tiny random llama on disk, target and its own draft at once: for measuring the machinery, not a model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, MIDDLE, VOCAB, POSITIONS = 64, 2, 4, 2, 128, 512, 512


def write_tiny(folder: Path, *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors; returns the folder."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * float(columns**-0.5)

    head = HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN) * 3,  # a law with likely and unlikely tokens, as real models have
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (MIDDLE, HIDDEN),
            "mlp.up_proj": (MIDDLE, HIDDEN),
            "mlp.down_proj": (HIDDEN, MIDDLE),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"model.layers.{layer}.{name}.weight": torch.ones(HIDDEN)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": MIDDLE,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder
