"""Three small checkpoints, the same bits everywhere: a target, a draft that is nearly the target, an EAGLE-3 head.

Their shapes are those that devices are built for (heads of width 64, groups of 2). The target leans towards one
successor of each token, as a trained model leans towards what it has read, and its layers add a context of random
weights: so most choices are clear, some are close, and both drafts are right often enough for every accepted length to
occur. Written by `recording` into a folder of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ssd_ascend.parity.numbers import normal

VOCAB = 32
LAYERS = 4
CAPTURED = (0, 1, 2)
_HIDDEN, _HEADS, _KV_HEADS, _WIDTH, _INNER = 256, 4, 2, 64, 384
_LEANING, _NOISE = 0.7, 0.1
_KNOWN = [token for token in range(VOCAB) if token % 4 != 3]
"""The tokens an EAGLE-3 head drafts."""
_COMMON: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "vocab_size": VOCAB,
    "torch_dtype": "bfloat16",
}
_TARGET = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "head_dim": _WIDTH,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = _COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": len(_KNOWN),
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(CAPTURED)},
}
Tensors = dict[str, torch.Tensor]


def target_tensors() -> Tensors:
    """The target's weights under their public names."""
    tensors = {
        "model.embed_tokens.weight": normal("embed", VOCAB, _HIDDEN),
        "model.norm.weight": _norm("norm"),
        "lm_head.weight": _matrix("head", VOCAB, _HIDDEN),
    }
    tensors["lm_head.weight"] = _leaning(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= _layer(prefix, _HIDDEN) | {f"{prefix}input_layernorm.weight": _norm(f"{prefix}input")}
    return tensors


def draft_tensors(target: Tensors) -> Tensors:
    """The target, every matrix slightly off."""
    return {
        name: (tensor + _NOISE * tensor.std() * normal(f"off {name}", *tensor.shape)).to(torch.bfloat16).float()
        if tensor.dim() > 1
        else tensor
        for name, tensor in target.items()
    }


def head_tensors(target: Tensors) -> Tensors:
    """An EAGLE-3 head that attends to the last token, by its embedding, and knows the successors of most tokens."""
    tensors = _layer("midlayer.", 2 * _HIDDEN)
    seen = normal("seen", _KV_HEADS * _WIDTH, _HIDDEN, scale=_HIDDEN**-0.5)
    group = _HEADS // _KV_HEADS
    heads = seen.view(_KV_HEADS, 1, _WIDTH, _HIDDEN).expand(-1, group, -1, -1).reshape(-1, _HIDDEN)
    for name, matrix in (("q", heads), ("k", seen), ("v", seen)):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat((matrix, torch.zeros_like(matrix)), dim=1)
    tensors["midlayer.self_attn.o_proj.weight"] = heads.t().contiguous()
    tensors |= {f"midlayer.{name}.weight": _norm(name) for name in ("input_layernorm", "hidden_norm")}
    tensors["fc.weight"] = _matrix("fc", _HIDDEN, len(CAPTURED) * _HIDDEN) * 0.25
    tensors["norm.weight"] = _norm("head norm")
    tensors["lm_head.weight"] = target["lm_head.weight"][_KNOWN]
    tensors["d2t"] = torch.tensor(_KNOWN) - torch.arange(len(_KNOWN))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(_KNOWN), True)
    return tensors


def _leaning(head: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """A vocabulary head that favours one successor of each token."""
    successors = (torch.arange(VOCAB) * 5 + 7) % VOCAB
    favour = torch.zeros_like(head).index_copy_(0, successors, embedding) * (_LEANING / _HIDDEN**0.5)
    return (head + favour).to(torch.bfloat16).float()


def write_checkpoints(folder: Path) -> dict[str, Tensors]:
    """Write `target`, `model` and `eagle3` below `folder`; returns their tensors, for a fingerprint."""
    target = target_tensors()
    written = {"target": target, "model": draft_tensors(target), "eagle3": head_tensors(target)}
    for name, tensors in written.items():
        (folder / name).mkdir(parents=True)
        config = _HEAD if name == "eagle3" else _TARGET
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        saved = {key: t.to(torch.bfloat16) if t.is_floating_point() else t for key, t in tensors.items()}
        save_file(saved, folder / name / "model.safetensors")
    return written


def _layer(prefix: str, inputs: int) -> Tensors:
    shapes = {
        "self_attn.q_proj": (_HEADS * _WIDTH, inputs),
        "self_attn.k_proj": (_KV_HEADS * _WIDTH, inputs),
        "self_attn.v_proj": (_KV_HEADS * _WIDTH, inputs),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _WIDTH),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    matrices = {f"{prefix}{name}.weight": _matrix(f"{prefix}{name}", *shape) for name, shape in shapes.items()}
    return matrices | {f"{prefix}post_attention_layernorm.weight": _norm(f"{prefix}post")}


def _matrix(name: str, rows: int, columns: int) -> torch.Tensor:
    return normal(name, rows, columns, scale=1.2 / columns**0.5)


def _norm(name: str) -> torch.Tensor:
    return normal(name, _HIDDEN, scale=0.2, mean=1.0)
