"""Tiny random checkpoints on disk, of every family and dialect, and what it takes to run one forward of them.

Weights are seeded and large enough for a wrong rotation, norm or layout to show in the logits. Needs torch only, so
that tests which merely want *some* model start quickly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ssd_ascend.backends.base import Collectives
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.layers.attention import attention_spec
from ssd_ascend.layers.context import BuildContext

Tensors = dict[str, torch.Tensor]
BLOCK_SIZE = 16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def llama_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` of a llama with 4 layers and 2 query heads per key-value head."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 96,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**config, **changes}


def mistral_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` of a mistral: a head_dim of its own, as Nemo has, and a window that is named and null."""
    family = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16, "rope_theta": 1e6}
    config = llama_config(**{**family, "sliding_window": None, **changes})
    return {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` of a qwen3: head_dim of its own, tied, theta of a million."""
    family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6}
    return llama_config(**{**family, "tie_word_embeddings": True, **changes})


def qwen2_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` of a qwen2, which does not mention the biases on its queries, keys and values."""
    family = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "use_sliding_window": False,
    }
    config = llama_config(**{**family, **changes})
    return {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` of a sparse qwen3: two of five experts a token, and one dense layer among the four."""
    family = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }
    return qwen3_config(**{**family, **changes})


def causal_lm_tensors(config: Mapping[str, Any], *, seed: int = 0) -> Tensors:
    """Random float32 weights under HF names."""
    random = torch.Generator().manual_seed(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=random),
        "model.norm.weight": _norm(hidden, random),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _matrix(vocab, hidden, random)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= _layer(prefix, config, hidden, random)
        tensors[f"{prefix}input_layernorm.weight"] = _norm(hidden, random)
        if config["model_type"] == "qwen2":
            rows = (config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"])
            for name, heads in zip(("q_proj", "k_proj", "v_proj"), rows, strict=True):
                bias = torch.randn(heads * head_dim_of(config), generator=random)
                tensors[f"{prefix}self_attn.{name}.bias"] = bias
        if config["model_type"].startswith("qwen3"):
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{name}.weight"] = _norm(head_dim_of(config), random)
    return tensors


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Tensors | None = None,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config.json and safetensors (with an index, if sharded), random by default; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = causal_lm_tensors(config) if tensors is None else tensors
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = list(tensors)
    homes = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(homes.values()):
        save_file({name: tensors[name] for name in names if homes[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return directory


def write_gguf(
    path: Path, config: Mapping[str, Any], tensors: Tensors, *, encoding: str = "F32", **metadata: Any
) -> Path:
    """Write a `.gguf` as llama.cpp's converter does: its names, and for llama its order of q and k rows.

    `encoding` is a name of gguf's GGMLQuantizationType, for matrices; vectors stay float32. `metadata` is added with
    the family's prefix, dots written as `__`.
    """
    import gguf

    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim_of(config))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{family}.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config["num_hidden_layers"])
    for name, tensor in tensors.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if family == "llama" and heads is not None:
            tensor = tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = gguf.GGMLQuantizationType[encoding if tensor.dim() > 1 else "F32"]
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(theirs, gguf.quants.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def eagle3_config(target: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A flat head config (SpecForge, SGLang) for `target`: half its vocabulary, capture layers listed as outputs."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": target["rope_theta"],
        "max_position_embeddings": 64,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"] // 2,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    return {**config, **changes}


def speculators_config(target: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The same head as vLLM's speculators write it: the layer nested, capture layers as inputs."""
    flat = eagle3_config(target)
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": flat.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "target_hidden_size": None,
        "norm_before_residual": True,
    }
    del flat["eagle_config"]
    return {**outer, "transformer_layer_config": flat, **changes}


def eagle3_tensors(config: Mapping[str, Any], target: Mapping[str, Any], *, seed: int = 1) -> Tensors:
    """Random weights of a head under flat names, with a d2t that keeps every second target id."""
    layer = config.get("transformer_layer_config", config)
    random = torch.Generator().manual_seed(seed)
    hidden, draft_vocab = layer["hidden_size"], config["draft_vocab_size"]
    tensors = _layer("midlayer.", layer, 2 * hidden, random)
    for name in ("input_layernorm", "hidden_norm"):
        tensors[f"midlayer.{name}.weight"] = _norm(hidden, random)
    tensors["fc.weight"] = _matrix(hidden, 3 * target["hidden_size"], random)
    tensors["norm.weight"] = _norm(hidden, random)
    tensors["lm_head.weight"] = _matrix(draft_vocab, hidden, random)
    kept = torch.arange(draft_vocab) * (layer["vocab_size"] // draft_vocab)
    tensors["d2t"] = kept - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(layer["vocab_size"], dtype=torch.bool).index_fill_(0, kept, True)
    return tensors


def head_dim_of(config: Mapping[str, Any]) -> int:
    """As everyone infers it."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def build_context(
    config: ModelConfig, *, dtype: torch.dtype = torch.float32, collectives: Collectives | None = None
) -> BuildContext:
    """A context on the CPU backend for a model of this config."""
    backend, ranks = load_backend("cpu"), collectives or SingleRank()
    device = backend.device(0)
    attention = backend.attention(attention_spec(config, ranks, block_size=BLOCK_SIZE, dtype=dtype), device)
    return BuildContext(dtype, device, backend.ops, attention, ranks)


def prefill_batch(
    ids: Sequence[int], *, hidden_states: torch.Tensor | None = None, logits_rows: Sequence[int] | None = None
) -> ForwardBatch:
    """One row: a whole prompt, in blocks 1, 2, ..."""
    count = len(ids)
    blocks = torch.arange(1, 1 + -(-count // BLOCK_SIZE), dtype=torch.int32)
    meta = AttentionMetadata(
        query_lens_host=[count],
        kv_lens_host=[count],
        query_start=torch.tensor([0, count], dtype=torch.int32),
        kv_lens=torch.tensor([count], dtype=torch.int32),
        block_table=blocks.unsqueeze(0),
        slot_mapping=torch.arange(BLOCK_SIZE, BLOCK_SIZE + count),
    )
    rows = None if logits_rows is None else torch.tensor(logits_rows)
    return ForwardBatch(Mode.PREFILL, torch.tensor(ids), torch.arange(count), meta, hidden_states, rows)


@torch.inference_mode()
def run(model: Any, ctx: BuildContext, num_layers: int, batch: ForwardBatch) -> ModelOutput:
    """One forward with a fresh KV cache."""
    num_blocks = 2 + batch.num_tokens // BLOCK_SIZE
    kv = tuple(torch.zeros(ctx.attention.kv_shape(num_blocks), dtype=ctx.dtype) for _ in range(num_layers))
    ctx.attention.plan(batch.attention)
    output: ModelOutput = model(batch, kv)
    return output


def _layer(prefix: str, config: Mapping[str, Any], inputs: int, random: torch.Generator) -> Tensors:
    """Attention over `inputs` columns, feed-forward, and the norm between them."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], head_dim_of(config)
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (q_rows, inputs),
        "self_attn.k_proj": (kv_rows, inputs),
        "self_attn.v_proj": (kv_rows, inputs),
        "self_attn.o_proj": (hidden, q_rows),
        **_feed_forward(prefix, config, hidden, inner),
    }
    tensors = {f"{prefix}{name}.weight": _matrix(*shape, random) for name, shape in shapes.items()}
    biased = {"self_attn": config.get("attention_bias"), "mlp": config.get("mlp_bias")}
    for name, (rows, _) in shapes.items():
        if biased[name.partition(".")[0]]:
            tensors[f"{prefix}{name}.bias"] = torch.randn(rows, generator=random)
    tensors[f"{prefix}post_attention_layernorm.weight"] = _norm(hidden, random)
    return tensors


def _feed_forward(prefix: str, config: Mapping[str, Any], hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Shapes of one gated part, or of a router and its experts."""

    def gated(name: str, width: int) -> dict[str, tuple[int, int]]:
        matrices = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return {f"{name}.{matrix}": shape for matrix, shape in matrices.items()}

    count, layer = config.get("num_experts", 0), prefix.strip(".").rpartition(".")[2]
    if not count or not layer.isdigit() or int(layer) in config["mlp_only_layers"]:
        return gated("mlp", inner)
    if (int(layer) + 1) % config["decoder_sparse_step"]:
        return gated("mlp", inner)
    experts = [gated(f"mlp.experts.{expert}", config["moe_intermediate_size"]) for expert in range(count)]
    return {"mlp.gate": (count, hidden), **{name: shape for expert in experts for name, shape in expert.items()}}


def _matrix(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=random) * (1.5 / columns**0.5)


def _norm(size: int, random: torch.Generator) -> torch.Tensor:
    return 1.0 + 0.3 * torch.randn(size, generator=random)
