"""How much a model weighs and reads, from the sizes in its preset: the cost model and the memory check start here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ssd_ascend.config.preset import Dims, Preset

NUM_CAPTURED = 3
"""Target layers whose features an EAGLE-3 head reads (all published heads)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`count` experts in each layer, of which a token takes `per_token`; `params` of one of them, over all layers."""

    count: int
    per_token: int
    params: int

    def distinct(self, rows: int) -> float:
        """How many of them `rows` tokens take together, were they taken at random."""
        return distinct_experts(self.count, self.per_token, rows)


def distinct_experts(count: int, per_token: int, rows: int) -> float:
    """How many of `count` experts `rows` tokens take together, were they taken at random."""
    return count * (1.0 - (1.0 - per_token / count) ** rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Weights in numbers. `step_params` multiply every token, `round_params` once a round, `resident_params` are held.
    `feature_bytes` is what the target sends along for each token. `experts`: what a token chooses from, if it does."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    intermediate: int
    dtype: str
    dtype_bytes: int
    step_params: int
    resident_params: int
    kv_bytes_per_token: int
    round_params: int = 0
    feature_bytes: int = 0
    experts: Experts | None = None

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a forward of one token reads; an embedding is a look-up and not counted."""
        return self.step_params * self.dtype_bytes

    def read_bytes(self, rows: int) -> float:
        """The same for `rows` tokens, which do not choose the same experts."""
        if self.experts is None:
            return self.step_bytes
        more = self.experts.distinct(rows) - self.experts.per_token
        return self.step_bytes + more * self.experts.params * self.dtype_bytes


def causal_shape(dims: Dims) -> Shape:
    """A target, or a draft that is a model of its own."""
    head = dims.vocab_size * dims.hidden_size
    step = dims.num_layers * _layer_params(dims, width=dims.hidden_size) + head
    experts = _experts(dims)
    idle = 0 if experts is None else (experts.count - experts.per_token) * experts.params
    resident = step + idle + (0 if dims.tie_embeddings else head)
    return replace(_shape(dims, step=step, resident=resident), experts=experts)


def eagle3_shape(dims: Dims, target: Dims) -> Shape:
    """An EAGLE-3 head of `dims` over `target`: its layer reads embedding and feature side by side, `fc` joins features.

    Beside its target it may borrow the embedding; on a device of its own, which is what is planned for, it holds one.
    """
    step = dims.num_layers * _layer_params(dims, width=2 * dims.hidden_size) + dims.vocab_size * dims.hidden_size
    fc = NUM_CAPTURED * target.hidden_size * dims.hidden_size
    embedding = target.vocab_size * dims.hidden_size
    features = NUM_CAPTURED * target.hidden_size * target.dtype_bytes
    return _shape(dims, step=step, resident=step + fc + embedding, round_params=fc, feature_bytes=features)


def draft_shape(preset: Preset) -> Shape | None:
    """The draft of a preset, or None."""
    if preset.draft is None:
        return None
    if preset.speculation is not None and preset.speculation.drafter == "eagle3":
        return eagle3_shape(preset.draft.dims, preset.target.dims)
    return causal_shape(preset.draft.dims)


def _layer_params(dims: Dims, *, width: int) -> int:
    """What a token meets in one layer: projections whose attention reads `width` numbers, and feed-forward."""
    q, kv = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    router = dims.hidden_size * dims.num_experts
    inner = dims.experts_per_token * dims.expert_size if dims.num_experts else dims.intermediate_size
    return width * (q + 2 * kv) + q * dims.hidden_size + router + 3 * dims.hidden_size * inner


def _experts(dims: Dims) -> Experts | None:
    if not dims.num_experts:
        return None
    params = dims.num_layers * 3 * dims.hidden_size * dims.expert_size
    return Experts(count=dims.num_experts, per_token=dims.experts_per_token, params=params)


def _shape(dims: Dims, *, step: int, resident: int, round_params: int = 0, feature_bytes: int = 0) -> Shape:
    return Shape(
        layers=dims.num_layers,
        hidden=dims.hidden_size,
        vocab=dims.vocab_size,
        heads=dims.num_heads,
        kv_heads=dims.num_kv_heads,
        intermediate=dims.expert_size or dims.intermediate_size,
        dtype=dims.dtype,
        dtype_bytes=dims.dtype_bytes,
        step_params=step,
        resident_params=resident,
        kv_bytes_per_token=dims.kv_bytes_per_token,
        round_params=round_params,
        feature_bytes=feature_bytes,
    )
