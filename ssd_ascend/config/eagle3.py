"""What an EAGLE-3 head is, read from the configs of all its producers. Torch-free; called by `weights.eagle3`.

Producers differ in three silent ways, decided here once:
- flat configs (SafeAILab, SpecForge, SGLang, AngelSlim) or the nested ones of vLLM's speculators;
- capture layers: flat configs list the layers whose *output* is taken, speculators those whose *input* is. We count
  inputs, so ids of flat configs move up by one. Without a list all producers mean inputs (2, L // 2, L - 3);
- `norm_output`: in speculators "the recycled feature is the normed output" (EAGLE-3.1), in flat configs "logits come
  from the normed output", which is true unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ssd_ascend.config.foreign import ForeignConfig
from ssd_ascend.config.model import ModelConfig, RopeConfig, rope_from_hf
from ssd_ascend.errors import ConfigError
from ssd_ascend.log import fields, get_logger

log = get_logger(__name__)
RopeChoice = Literal["draft", "target", "auto"]
Shapes = Mapping[str, tuple[int, ...]]
_ATTENTION = "midlayer.self_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """One head, checked against its target.

    layer: its decoder layer as a model of one layer over the *target's* vocabulary. capture_layers: target layer inputs
    (see `layers.decoder.Decoder`). own_embedding, own_lm_head: False where the target's is used.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    capture_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    fc_bias: bool
    qk_norm: bool
    logits_from_normed: bool
    recycle_normed: bool
    own_embedding: bool
    own_lm_head: bool

    @property
    def feature_size(self) -> int:
        """Width of the target features that `combine` takes."""
        return len(self.capture_layers) * self.target_hidden_size


def eagle3_config(
    data: Mapping[str, Any],
    *,
    where: str,
    shapes: Shapes,
    target: ModelConfig,
    rope: RopeChoice = "draft",
    capture_layers: tuple[int, ...] | None = None,
) -> Eagle3Config:
    """Read a head's `config.json` and the shapes of its tensors, by canonical names; ConfigError when it cannot serve
    `target`, with the numbers of both. `capture_layers` (layer inputs) overrules what the config says."""
    nested = isinstance(data.get("transformer_layer_config"), Mapping)
    inner: dict[str, Any] = dict(data["transformer_layer_config"]) if nested else dict(data)
    # NVIDIA and SpecForge put switches into a table of their own
    switches = ForeignConfig({**data, **ForeignConfig(data, where).table("eagle_config")}, where)
    layer = _layer(inner, where, shapes, target, _rope(inner, where, target, rope))
    captured = capture_layers or _capture_layers(switches, target.num_layers, shifted=not nested)
    config = Eagle3Config(
        layer=layer,
        draft_vocab_size=ForeignConfig(data, where).integer("draft_vocab_size", layer.vocab_size),
        target_hidden_size=switches.integer("target_hidden_size", target.hidden_size),
        capture_layers=captured,
        norm_before_residual=switches.flag("norm_before_residual", default=nested),
        norm_before_fc=switches.flag("norm_before_fc", default="input_norm.weight" in shapes),
        fc_norm=switches.flag("fc_norm", default="fc_norm.0.weight" in shapes),
        fc_bias="fc.bias" in shapes,
        qk_norm=f"{_ATTENTION}.q_norm.weight" in shapes,
        logits_from_normed=nested or switches.flag("norm_output", default=True),
        recycle_normed=switches.flag("return_hidden_post_norm", default=False)
        or (nested and switches.flag("norm_output", default=False)),
        own_embedding="embed_tokens.weight" in shapes,
        own_lm_head="lm_head.weight" in shapes,
    )
    _check_pairing(config, where, shapes, target)
    log.debug("EAGLE-3 head %s", fields(capture_layers=captured, draft_vocab=config.draft_vocab_size, path=where))
    return config


def _layer(inner: Mapping[str, Any], where: str, shapes: Shapes, target: ModelConfig, rope: RopeConfig) -> ModelConfig:
    config = ForeignConfig(inner, where)
    layers = config.integer("num_hidden_layers", 1)
    if layers != 1:
        raise ConfigError(f"{where}: an EAGLE-3 head of {layers} layers is not supported", remedy="use one of 1 layer")
    hidden_size, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    return ModelConfig(
        family="llama",
        hidden_size=hidden_size,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, shapes, heads, kv_heads, hidden_size // heads),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size", target.vocab_size),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        attention_bias=f"{_ATTENTION}.q_proj.bias" in shapes,
        mlp_bias="midlayer.mlp.gate_proj.bias" in shapes,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        rope=rope,
    )


def _head_dim(config: ForeignConfig, shapes: Shapes, heads: int, kv_heads: int, fallback: int) -> int:
    """From the weights, because published configs get it wrong (AngelSlim's Qwen3-32B says 80, its weights 128)."""
    stated = config.integer("head_dim", fallback)
    rows = [
        shapes[name][0] for name in (f"{_ATTENTION}.q_proj.weight", f"{_ATTENTION}.k_proj.weight") if name in shapes
    ]
    if len(rows) < 2:
        return stated  # the loader will name what is missing
    if rows[0] % heads or rows[0] // heads * kv_heads != rows[1]:
        raise ConfigError(
            f"{config.where}: {heads} heads and {kv_heads} key-value heads do not fit q_proj and k_proj of "
            f"{rows[0]} and {rows[1]} rows",
            remedy="check that its config belongs to it",
        )
    found = rows[0] // heads
    if found != stated:
        log.warning("head_dim is taken from the weights %s", fields(config=stated, weights=found, path=config.where))
    return found


def _rope(inner: Mapping[str, Any], where: str, target: ModelConfig, choice: RopeChoice) -> RopeConfig:
    """The draft's own settings, unless told otherwise; "auto" takes the target's where the draft's config is silent."""
    stated = "rope_theta" in inner or "rope_theta" in ForeignConfig(inner, where).table("rope_parameters")
    if choice == "target" or (choice == "auto" and not stated):
        return target.rope
    own = rope_from_hf(inner, where=where)
    if not stated:
        log.warning(
            "the head's config has no rope_theta: 10000 it is %s", fields(draft=own.theta, target=target.rope.theta)
        )
    elif _rotation(own) != _rotation(target.rope):
        log.warning(
            "head and target rotate differently %s", fields(draft=_rotation(own), target=_rotation(target.rope))
        )
    return own


def _rotation(rope: RopeConfig) -> tuple[Any, ...]:
    """What of a rope changes angles: without scaling, the context it was trained for does not."""
    if rope.type in ("default", "linear"):
        return (rope.type, rope.theta, rope.factor)
    return (rope.type, replace(rope, attention_factor=None))


def _capture_layers(switches: ForeignConfig, num_layers: int, *, shifted: bool) -> tuple[int, ...]:
    if not switches.flag("use_aux_hidden_state", default=True):
        raise ConfigError(
            f"{switches.where}: 'use_aux_hidden_state' is false: that head reads the last normed state only",
            remedy="use an EAGLE-3 head",
        )
    inputs = switches.data.get("eagle_aux_hidden_state_layer_inputs")
    outputs_or_inputs = switches.data.get("eagle_aux_hidden_state_layer_ids")
    if inputs:
        captured = _ids(inputs, switches.where)
    elif outputs_or_inputs:
        captured = tuple(index + (1 if shifted else 0) for index in _ids(outputs_or_inputs, switches.where))
    else:
        captured = (2, num_layers // 2, num_layers - 3)
        log.warning(
            "the head's config names no capture layers, taking the customary ones %s",
            fields(layer_inputs=captured, path=switches.where),
        )
    if any(not 0 <= index <= num_layers for index in captured):
        raise ConfigError(
            f"{switches.where}: capture layers {list(captured)} (as inputs) do not fit a target of {num_layers} layers",
            remedy="use a head that was trained for this target",
        )
    return captured


def _ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(not isinstance(item, int) for item in value):
        raise ConfigError(f"{where}: capture layers {value!r} are not a list of integers")
    return tuple(value)


def _check_pairing(config: Eagle3Config, where: str, shapes: Shapes, target: ModelConfig) -> None:
    remedy = "use a head that was trained for this target"
    if config.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"{where}: the head was made for a target of hidden size {config.target_hidden_size}, "
            f"this one has {target.hidden_size}",
            remedy=remedy,
        )
    width = shapes.get("fc.weight", (0, config.feature_size))[-1]
    if width != config.feature_size:
        raise ConfigError(
            f"{where}: the head's fc takes {width} features, but {len(config.capture_layers)} captured layers "
            f"of a target of hidden size {target.hidden_size} give {config.feature_size}",
            remedy=remedy,
        )
    if config.layer.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{where}: the head knows a vocabulary of {config.layer.vocab_size}, the target's has {target.vocab_size}",
            remedy=remedy,
        )
    if config.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"{where}: the draft vocabulary of {config.draft_vocab_size} exceeds the target's {target.vocab_size}",
            remedy=remedy,
        )
    if config.draft_vocab_size < target.vocab_size and "d2t" not in shapes:
        raise ConfigError(
            f"{where}: the draft vocabulary of {config.draft_vocab_size} is smaller than the target's "
            f"{target.vocab_size}, but there is no 'd2t' to map it",
            remedy="download the whole head",
        )
    _check_borrowed(config, where, target)


def _check_borrowed(config: Eagle3Config, where: str, target: ModelConfig) -> None:
    """What the head does not bring along must fit when it is taken from the target."""
    own, theirs = config.layer.hidden_size, target.hidden_size
    for what, brought in (("embed_tokens", config.own_embedding), ("lm_head", config.own_lm_head)):
        if not brought and own != theirs:
            raise ConfigError(
                f"{where}: there is no {what}, and the target's does not fit: hidden size {own} against {theirs}",
                remedy="use a head with one of its own",
            )
    if not config.own_lm_head and config.draft_vocab_size != target.vocab_size:
        raise ConfigError(
            f"{where}: there is no lm_head, and the target's gives {target.vocab_size} logits, not "
            f"{config.draft_vocab_size}",
            remedy="download the whole head",
        )
