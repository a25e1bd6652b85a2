"""The head as it is trained: weights by their standard names, and one step of the unrolled chain as plain functions.

`architectures/eagle3.py` is the same arithmetic for serving, over a paged cache; a test holds the two equal. Here all
chains of a packed batch advance together, indexed by where they start (see `attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.training.attention import ChainAttention, Kernels, Segments

ATTENTION, MLP = "midlayer.self_attn.", "midlayer.mlp."
MATRICES = (
    "fc.weight",
    *(f"{ATTENTION}{name}_proj.weight" for name in "qkvo"),
    *(f"{MLP}{name}_proj.weight" for name in ("gate", "up", "down")),
)
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
LM_HEAD = "lm_head.weight"

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a head for `target` looks like: one layer of the target's own kind (without norms of queries and keys)."""

    target: ModelConfig
    draft_vocab: int
    capture_layers: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor by its standard name."""
        t = self.target
        d, q, kv, inner = t.hidden_size, t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim, t.intermediate_size
        return {
            "fc.weight": (d, len(self.capture_layers) * d),
            f"{ATTENTION}q_proj.weight": (q, 2 * d),
            f"{ATTENTION}k_proj.weight": (kv, 2 * d),
            f"{ATTENTION}v_proj.weight": (kv, 2 * d),
            f"{ATTENTION}o_proj.weight": (d, q),
            f"{MLP}gate_proj.weight": (inner, d),
            f"{MLP}up_proj.weight": (inner, d),
            f"{MLP}down_proj.weight": (d, inner),
            **{f"{name}.weight": (d,) for name in NORMS},
            LM_HEAD: (self.draft_vocab, d),
        }

    @property
    def num_parameters(self) -> int:
        """Of all trained tensors together."""
        return sum(torch.Size(shape).numel() for shape in self.shapes().values())


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """The layer inputs that all producers take unless told otherwise; fewer where a toy has too few layers."""
    return tuple(dict.fromkeys((min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 1))))


class Cast(NamedTuple):
    """The weights of one optimizer step in the dtype of the arithmetic, packed as it wants them."""

    fc: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, weights: Weights, dtype: torch.dtype) -> Cast:
        """Gradients flow back through the cast to the float32 weights."""
        w = {name: weights[name].to(dtype) for name in MATRICES}
        return cls(
            fc=w["fc.weight"],
            qkv=torch.cat([w[f"{ATTENTION}{name}_proj.weight"] for name in "qkv"]),
            o=w[f"{ATTENTION}o_proj.weight"],
            gate_up=torch.cat([w[f"{MLP}gate_proj.weight"], w[f"{MLP}up_proj.weight"]]),
            down=w[f"{MLP}down_proj.weight"],
            norms=tuple(weights[f"{name}.weight"] for name in NORMS),
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As everywhere: float32 inside, the input's dtype outside."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def enter(
    embedded: torch.Tensor,
    feature: torch.Tensor,
    qkv: torch.Tensor,
    norm_embedded: torch.Tensor,
    norm_feature: torch.Tensor,
    eps: float,
    head_dim: int,
) -> torch.Tensor:
    """Norms and projection: [N, d] twice -> [N, heads of q, k and v, D]."""
    x = torch.cat((rms_norm(embedded, norm_embedded, eps), rms_norm(feature, norm_feature, eps)), dim=-1)
    return torch.nn.functional.linear(x, qkv).unflatten(1, (-1, head_dim))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate halves: x [N, H, D], angles float32 [N, 2, R / 2] (cosines, sines); dimensions beyond R pass through."""
    half = angles.shape[-1]
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def leave(
    attended: torch.Tensor,
    feature: torch.Tensor,
    o: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    norm_mlp: torch.Tensor,
    norm_out: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output projection and feed-forward: attended [N, H * D] -> (the next feature, the same normed for the head)."""
    linear = torch.nn.functional.linear
    residual = feature + linear(attended, o)
    gate, up = linear(rms_norm(residual, norm_mlp, eps), gate_up).chunk(2, dim=-1)
    out = residual + linear(torch.nn.functional.silu(gate) * up, down)
    return out, rms_norm(out, norm_out, eps)


class Arithmetic(NamedTuple):
    """The functions a chain is computed with; `compiled.py` may put faster ones in their place."""

    kernels: Kernels
    enter: Callable[..., torch.Tensor] = enter
    rotate: Callable[..., torch.Tensor] = rotate
    leave: Callable[..., tuple[torch.Tensor, torch.Tensor]] = leave


class Chain:
    """All chains of one packed batch. `advance` feeds each its next token; its results are for the logits after it."""

    def __init__(
        self,
        cast: Cast,
        config: ModelConfig,
        arithmetic: Arithmetic,
        segments: Segments,
        features: torch.Tensor,
        *,
        normed_residual: bool = False,
    ) -> None:
        """config: the head's layer. features: [N, n * H], the target's, of the position that each chain starts at.
        normed_residual: the layer adds to its feature after the norm, as some heads of others do."""
        self._cast = cast
        self._config = config
        self._arithmetic = arithmetic
        self._segments = segments
        self._feature = torch.nn.functional.linear(features, cast.fc)
        self._normed_residual = normed_residual
        self._keys_values: list[torch.Tensor] = []

    def advance(self, embedded: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """embedded [N, d]: the token fed; angles [N, 2, R / 2]: of its entry. Returns the normed output [N, d]."""
        config, cast, do = self._config, self._cast, self._arithmetic
        mixed = do.enter(
            embedded, self._feature, cast.qkv, cast.norms[0], cast.norms[1], config.rms_norm_eps, config.head_dim
        )
        heads, kv_heads = config.num_heads, config.num_kv_heads
        turned = do.rotate(mixed[:, : heads + kv_heads], angles)
        q, k = turned.split((heads, kv_heads), dim=1)
        self._keys_values += [k.contiguous(), mixed[:, heads + kv_heads :].contiguous()]
        attended = ChainAttention.apply(
            do.kernels, self._segments, config.attention_scale, q.contiguous(), *self._keys_values
        )
        residual = (
            rms_norm(self._feature, cast.norms[1], config.rms_norm_eps) if self._normed_residual else self._feature
        )
        self._feature, normed = do.leave(
            attended.flatten(1), residual, cast.o, cast.gate_up, cast.down, cast.norms[2], cast.norms[3],
            config.rms_norm_eps,
        )  # fmt: skip
        return normed
