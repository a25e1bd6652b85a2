"""An EAGLE-3 head written out in plain torch, dense and batchless, straight from the tensors on disk.

Shares no line with the package: what the dialects' flags mean is decided here a second time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


class Dialect(NamedTuple):
    """What the flags of a config come down to."""

    heads: int = 4
    kv_heads: int = 2
    theta: float = 10000.0
    eps: float = 1e-5
    norm_before_residual: bool = False
    norm_output: bool = True
    recycle_normed: bool = False


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def combine(w: Tensors, features: torch.Tensor, eps: float) -> torch.Tensor:
    """Target features [T, 3 * H] -> [T, d]."""
    if "input_norm.weight" in w:
        features = norm(features, w["input_norm.weight"], eps)
    if "fc_norm.0.weight" in w:
        chunks = features.chunk(3, -1)
        features = torch.cat([norm(chunk, w[f"fc_norm.{i}.weight"], eps) for i, chunk in enumerate(chunks)], -1)
    return linear(w, "fc", features)


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x: [T, heads, D], token t at position t."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def attend(w: Tensors, x: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    tokens = len(x)
    q = linear(w, "midlayer.self_attn.q_proj", x).view(tokens, dialect.heads, -1)
    k = linear(w, "midlayer.self_attn.k_proj", x).view(tokens, dialect.kv_heads, -1)
    v = linear(w, "midlayer.self_attn.v_proj", x).view(tokens, dialect.kv_heads, -1)
    if "midlayer.self_attn.q_norm.weight" in w:
        q = norm(q, w["midlayer.self_attn.q_norm.weight"], dialect.eps)
        k = norm(k, w["midlayer.self_attn.k_norm.weight"], dialect.eps)
    q, k = rotate(q, dialect.theta), rotate(k, dialect.theta)
    group = dialect.heads // dialect.kv_heads
    out = []
    for head in range(dialect.heads):
        scores = q[:, head] @ k[:, head // group].T / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
        out.append(scores.softmax(-1) @ v[:, head // group])
    return linear(w, "midlayer.self_attn.o_proj", torch.cat(out, -1))


def head_forward(
    w: Tensors, ids: torch.Tensor, feature: torch.Tensor, dialect: Dialect
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens t_{i+1} [T] and features g_i [T, d] -> draft logits [T, V_draft], recycled features [T, d].

    `w` holds the embedding and the head in any case, borrowed or not.
    """
    eps = dialect.eps
    normed = norm(feature, w["midlayer.hidden_norm.weight"], eps)
    embedded = norm(w["embed_tokens.weight"][ids], w["midlayer.input_layernorm.weight"], eps)
    y = (normed if dialect.norm_before_residual else feature) + attend(w, torch.cat((embedded, normed), -1), dialect)
    z = norm(y, w["midlayer.post_attention_layernorm.weight"], eps)
    gated = F.silu(linear(w, "midlayer.mlp.gate_proj", z)) * linear(w, "midlayer.mlp.up_proj", z)
    out = y + linear(w, "midlayer.mlp.down_proj", gated)
    final = norm(out, w["norm.weight"], eps)
    logits = F.linear(final if dialect.norm_output else out, w["lm_head.weight"])
    return logits, final if dialect.recycle_normed else out
