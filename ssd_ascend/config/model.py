"""What a model is, read from its own files: a HF `config.json` or the metadata of a `.gguf`. Torch-free.

These files are foreign, so unknown keys are ignored; what we do need is checked here, once. Called by `weights.loader`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from ssd_ascend.config.foreign import ForeignConfig
from ssd_ascend.errors import ConfigError

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one model. Numbers that `type` does not use keep their defaults.

    `frequency_factors` divide the inverse frequencies one by one: how a `.gguf` spells llama3 scaling.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    partial_factor: float = 1.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Feed-forward parts of which a token takes `per_token` of `count`, each `intermediate_size` wide.

    normalised: the weights of those taken add up to 1. dense_layers: those with one ordinary feed-forward part instead.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, dense unless it has `experts`.

    `family` is its key in `architectures.registry`; `dtype` how it was saved.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    rope: RopeConfig = RopeConfig()
    experts: ExpertsConfig | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def attention_scale(self) -> float:
        """What query-key products are multiplied by."""
        return float(self.head_dim**-0.5)


def family_of(data: Mapping[str, Any], *, where: str) -> str:
    """The `model_type` of a HF config; ConfigError naming the file when there is none."""
    family = data.get("model_type")
    if not isinstance(family, str) or not family:
        raise ConfigError(
            f"{where} has no 'model_type', so the model's family is unknown",
            remedy='add it, for example "model_type": "llama"',
        )
    return family


def model_config_from_hf(data: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Read a `config.json` of either spelling; ConfigError names `where` and the key that cannot be served."""
    config = ForeignConfig(data, where)
    family = family_of(data, where=where)
    _refuse_unserved(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    _check_heads(num_heads, num_kv_heads, where)
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        attention_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        rope=rope_from_hf(data, where=where),
        experts=_experts(config),
        dtype=_dtype_of(data),
        bos_token_id=next(iter(token_ids(data.get("bos_token_id"))), None),
        eos_token_ids=token_ids(data.get("eos_token_id")),
    )


def _experts(config: ForeignConfig) -> ExpertsConfig | None:
    """The experts of a sparse model, as the Qwen family spells them; None where the config names none."""
    count = config.integer("num_experts", config.integer("num_local_experts", 0, at_least=0), at_least=0)
    if not count:
        return None
    per_token = config.integer("num_experts_per_tok")
    if per_token > count:
        raise ConfigError(f"{config.where}: {per_token} experts a token are more than there are ({count})")
    layers, every = range(config.integer("num_hidden_layers")), config.integer("decoder_sparse_step", 1)
    dense = token_ids(config.data.get("mlp_only_layers") or ())
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=config.integer("moe_intermediate_size", config.integer("intermediate_size")),
        normalised=config.flag("norm_topk_prob", default=False),
        dense_layers=frozenset(layer for layer in layers if layer in dense or (layer + 1) % every),
    )


def rope_from_hf(data: Mapping[str, Any], *, where: str) -> RopeConfig:
    """Rotary settings from `rope_theta` + `rope_scaling`, or from the newer `rope_parameters`, which wins."""
    outer = ForeignConfig(data, where)
    values = {**outer.table("rope_scaling"), **outer.table("rope_parameters")}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{where}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}",
            remedy="serve a model that uses one of these",
        )
    inner = ForeignConfig(values, f"{where} (rope)")
    max_positions = outer.integer("max_position_embeddings", 2048)
    original = inner.integer("original_max_position_embeddings", max_positions)
    # a null factor means "by how much the context was stretched", as some yarn configs leave it
    stretched = max_positions / original if kind == "yarn" else None
    return RopeConfig(
        type=cast(RopeType, kind),
        theta=inner.number("rope_theta", outer.number("rope_theta", 10000.0)),
        partial_factor=inner.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0)),
        factor=1.0 if kind == "default" else inner.number("factor", stretched),
        original_max_positions=original,
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        beta_fast=inner.optional_number("beta_fast") or 32.0,
        beta_slow=inner.optional_number("beta_slow") or 1.0,
        mscale=inner.optional_number("mscale"),
        mscale_all_dim=inner.optional_number("mscale_all_dim"),
        attention_factor=inner.optional_number("attention_factor"),
        truncate=inner.flag("truncate", default=True),
    )


def model_config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    where: str,
    tensors: Collection[str],
    frequency_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """Read the metadata of a `.gguf`. `tensors` are the names in the file (ties and biases show only there);
    `frequency_factors` is its `rope_freqs.weight`, if any. `vocab_size` must be among the metadata."""
    family = metadata.get("general.architecture")
    if not isinstance(family, str):
        raise ConfigError(f"{where} has no 'general.architecture', so the model's family is unknown")
    prefix = f"{family}."
    config = ForeignConfig({key.removeprefix(prefix): value for key, value in metadata.items()}, where)
    if config.integer("expert_count", 0, at_least=0):
        raise ConfigError(f"{where}: experts in a .gguf are not supported", remedy="use the safetensors checkpoint")
    hidden_size = config.integer("embedding_length")
    num_heads = config.integer("attention.head_count")
    num_kv_heads = config.integer("attention.head_count_kv", num_heads)
    _check_heads(num_heads, num_kv_heads, where)
    head_dim = config.integer("attention.key_length", hidden_size // num_heads)
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=config.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("feed_forward_length"),
        vocab_size=config.integer("vocab_size"),
        rms_norm_eps=config.number("attention.layer_norm_rms_epsilon", 1e-6),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        max_position_embeddings=config.integer("context_length", 2048),
        rope=_rope_from_gguf(config, head_dim, frequency_factors),
        bos_token_id=next(iter(token_ids(metadata.get("tokenizer.ggml.bos_token_id"))), None),
        eos_token_ids=tuple(dict.fromkeys(token_ids([value for value in eos if value is not None]))),
    )


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` and the like are an integer, a list of them, or null."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _rope_from_gguf(config: ForeignConfig, head_dim: int, factors: tuple[float, ...] | None) -> RopeConfig:
    kind = config.data.get("rope.scaling.type", "none")
    kind = "default" if kind == "none" else kind
    if kind not in ("default", "linear", "yarn"):
        raise ConfigError(f"{config.where}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    factor = config.number("rope.scaling.factor", 1.0)
    # llama.cpp multiplies this with the factor that yarn's paper derives; HF's `attention_factor` replaces that
    extra = config.optional_number("rope.scaling.attn_factor")
    if extra is not None:
        extra *= 1.0 + 0.1 * math.log(max(factor, 1.0))
    return RopeConfig(
        type=cast(RopeType, kind),
        theta=config.number("rope.freq_base", 10000.0),
        partial_factor=config.integer("rope.dimension_count", head_dim) / head_dim,
        factor=factor,
        original_max_positions=config.integer(
            "rope.scaling.original_context_length", config.integer("context_length", 2048)
        ),
        beta_fast=config.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=config.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=extra if kind == "yarn" else None,
        frequency_factors=factors,
    )


def _refuse_unserved(config: ForeignConfig) -> None:
    """Settings that would be ignored silently, and so give wrong answers, are errors."""
    activation = config.data.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{config.where}: hidden_act {activation!r} is not supported; supported: silu")
    if config.data.get("quantization_config"):
        raise ConfigError(
            f"{config.where}: checkpoints with a 'quantization_config' are not supported",
            remedy="use the unquantised checkpoint, or a .gguf file",
        )
    # Qwen's configs name a window and switch it off; where there is no switch, naming one is using it
    named = config.data.get("sliding_window") is not None
    if config.flag("use_sliding_window", default=named):
        raise ConfigError(f"{config.where}: sliding-window attention is not supported")


def _check_heads(num_heads: int, num_kv_heads: int, where: str) -> None:
    if num_heads % num_kv_heads:
        raise ConfigError(f"{where}: {num_heads} attention heads are no multiple of {num_kv_heads} key-value heads")


def _dtype_of(data: Mapping[str, Any]) -> str | None:
    name = data.get("dtype", data.get("torch_dtype"))
    name = name.removeprefix("torch.") if isinstance(name, str) else None
    return name if name in DTYPES else None
