"""The shapes of public models, as the `config.json` they come with: for models with random weights of true size."""

from __future__ import annotations

from typing import Any

from ssd_ascend.errors import unknown_name

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    } | more


def _qwen3(hidden: int, layers: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    } | more


_TINY = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
         "intermediate_size": 128, "vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    # no public model: what a rehearsal on a CPU runs
    "tiny": _llama(128, 6, 4, 4, 128, **_TINY),
    "tiny-draft": _llama(128, 2, 4, 4, 128, **_TINY),
}

_DRAFT_VOCAB = 32000


def shape(name: str, *, layers: int | None = None) -> dict[str, Any]:
    """The config of a public model, cut to `layers` layers when given."""
    if name not in SHAPES:
        raise unknown_name("shape", name, SHAPES)
    config = dict(SHAPES[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    return config


def eagle3_shape(target: dict[str, Any]) -> dict[str, Any]:
    """The config of an EAGLE-3 head for a target: one layer of its size, and a draft vocabulary of 32000."""
    kept = (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "rms_norm_eps",
        "rope_theta", "rope_scaling", "max_position_embeddings", "torch_dtype", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    vocab = target["vocab_size"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "head_dim": target.get("head_dim", target["hidden_size"] // target["num_attention_heads"]),
        "draft_vocab_size": _DRAFT_VOCAB if vocab > _DRAFT_VOCAB else vocab * 2 // 3,
        # the layer's residual is then of known size whatever went in, which a chain of drafts needs to stay on course
        "norm_before_residual": True,
        **{name: target[name] for name in kept if name in target},
    }
