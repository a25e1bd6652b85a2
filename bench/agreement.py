"""Weights that make a target follow one chain of tokens, and its draft agree with it as often as asked.

Where no checkpoint can be had, speculation still has to be measured: with drafts that are kept, and outcomes that are
foreseen, as often as with trained models. Both are built into the weights, so every kernel, copy and process does its
true work, and whoever reads the tokens finds nothing made up. `bench/synthetic.py` and `bench/checkpoints.py` use it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.errors import ConfigError

CORE = 32000
"""The chain never leaves the first so many tokens, so that a head with a smaller vocabulary can follow it."""
_SECOND = 0.7
"""How strongly a draft believes in its second choice, the first one being 1. Noise is far below both."""
_LOGIT = 16.0
"""The logit of the token that follows, those of all others being about 0."""
_FOCUS = 20.0
"""By how much an entry of an EAGLE-3 head attends to itself rather than to another, in the exponent."""


def successor(vocab_size: int, core: int | None = None) -> torch.Tensor:
    """int64 [V]: the token that follows each token, the same in all models of one vocabulary."""
    core = min(vocab_size, CORE if core is None else core)
    generator = torch.Generator().manual_seed(20)
    inside = torch.randperm(core, generator=generator)
    return torch.cat((inside, core + torch.randperm(vocab_size - core, generator=generator)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How good a draft is.

    accepted: after how many of all tokens its first choice is the target's. foreseen: after how many of the others the
    target's token is its second choice, which any fan-out of two or more prepares for. core: see `CORE`.
    """

    accepted: float
    foreseen: float
    core: int | None = None

    def __post_init__(self) -> None:
        for name in ("accepted", "foreseen"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}", remedy="give a share from 0 to 1")

    def choices(self, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [V] twice: the draft's first and second choice after each token."""
        follows = successor(vocab_size, self.core)
        core = min(vocab_size, CORE if self.core is None else self.core)
        # what follows other tokens of the core: never the target's own choice, as `follows` repeats none
        wrong, worse = (torch.cat((follows[:core].roll(-by), follows[core:].roll(-by))) for by in (1, 2))
        generator = torch.Generator().manual_seed(21)
        luck, insight = torch.rand((2, vocab_size), generator=generator)
        agrees, foresees = luck < self.accepted, insight < self.foreseen
        first = torch.where(agrees, follows, wrong)
        return first, torch.where(agrees, wrong, torch.where(foresees, follows, worse))


class Weights:
    """Weights of a model by name, the same whatever the order they are asked for in.

    noise None: random, and so is what the model says. A number: the output layer makes the next token the `successor`
    of the current one, and the layers add noise of that size to it; so two models agree the more, the less of it they
    have. With an `agreement` the output layer is a draft's, which errs as often as that says.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        seed: int,
        noise: float | None,
        agreement: Agreement | None = None,
        core: int | None = None,
    ) -> None:
        if noise is not None and config.tie_word_embeddings:
            raise ConfigError("noise needs an output layer of its own", remedy="set tie_word_embeddings to false")
        if noise is None and agreement is not None:
            raise ConfigError("a draft that agrees needs a number for its noise", remedy="give noise")
        self.config, self.device, self.dtype = config, device, dtype
        self._seed, self._noise, self._agreement, self._core = seed, noise, agreement, core

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor. Norm weights are 1; a matrix's outputs are about as large as its inputs, so nothing overflows."""
        if len(shape) == 1:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            return fill(shape, dtype=self.dtype, device=self.device)
        if self._noise is None:
            return self.normal(name, shape, 1 / math.sqrt(shape[-1]))
        if name.endswith("embed_tokens.weight"):
            return self.embedding(shape)
        if name.endswith("lm_head.weight"):
            return self._output(shape)
        deviation = 1 / math.sqrt(shape[-1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # what the 2 * num_layers sub-layers add up to, against an embedding of norm sqrt(hidden_size)
            deviation *= self._noise * math.sqrt(self.config.hidden_size / (2 * self.config.num_layers))
        return self.normal(name, shape, deviation)

    def _output(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Row t is the sum of the embeddings of the tokens that t should follow."""
        rows = self.embedding(shape) * (_LOGIT / shape[1])
        if self._agreement is not None:
            return spread_rows(rows, *self._agreement.choices(shape[0]))
        head = torch.empty_like(rows)
        head[successor(shape[0], self._core).to(self.device)] = rows
        return head

    def embedding(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Of the tokens, which are then about at right angles."""
        return self.normal("embedding", shape, 1.0)

    def normal(self, name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        """Random numbers that depend on the name and the seed alone."""
        generator = torch.Generator(self.device).manual_seed((self._seed << 32) + zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(0.0, deviation, generator=generator)


class HeadWeights:
    """Weights of an EAGLE-3 head that guesses the chain from the token alone, by the names of its checkpoint.

    Its attention looks at its own entry (keys are their own queries), takes a projection of the token's embedding from
    there, and the output layer knows what such projections are followed by. The target's features pass through all
    matrices, and end as noise.
    """

    def __init__(self, data: dict[str, Any], target: Weights, *, agreement: Agreement, noise: float) -> None:
        self._target, self._agreement, self._noise = target, agreement, noise
        self._hidden: int = data["hidden_size"]
        self._heads, self._kv_heads = data["num_attention_heads"], data["num_key_value_heads"]
        self._head_dim: int = data["head_dim"]
        self._vocab, self._draft_vocab = data["vocab_size"], data["draft_vocab_size"]
        self.shapes = self._shapes(data["intermediate_size"])

    def _shapes(self, inner: int) -> dict[str, tuple[int, ...]]:
        hidden, layer = self._hidden, "midlayer"
        queries, keys = self._heads * self._head_dim, self._kv_heads * self._head_dim
        norms = (f"{layer}.input_layernorm", f"{layer}.hidden_norm", f"{layer}.post_attention_layernorm", "norm")
        return {
            "fc.weight": (hidden, 3 * hidden),
            **{f"{norm}.weight": (hidden,) for norm in norms},
            f"{layer}.self_attn.q_proj.weight": (queries, 2 * hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, 2 * hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, 2 * hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            "lm_head.weight": (self._draft_vocab, hidden),
            "d2t": (self._draft_vocab,),
        }

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor."""
        device, dtype = self._target.device, self._target.dtype
        if name == "d2t":  # offsets: the draft's tokens are the target's first ones
            return torch.zeros(shape, dtype=torch.int64, device=device)
        if name.endswith("hidden_norm.weight"):
            return torch.full(shape, self._noise, dtype=dtype, device=device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            gain = math.sqrt(_FOCUS / math.sqrt(self._head_dim))
            keys = self._random("keys", self.shapes["midlayer.self_attn.k_proj.weight"], gain / math.sqrt(self._hidden))
            return keys if shape == keys.shape else self._for_every_head(keys)
        if name.endswith("v_proj.weight"):
            return self._values()
        if name.endswith("o_proj.weight"):
            gain = math.sqrt(self._hidden / (self._kv_heads * self._head_dim)) * self._kv_heads / self._heads
            return self._for_every_head(self._values()[:, : self._hidden]).T.contiguous() * gain
        if name == "lm_head.weight":
            return self._output()
        deviation = 1 / math.sqrt(shape[-1])
        return self._random(name, shape, deviation * (self._noise if name.endswith("down_proj.weight") else 1.0))

    def _values(self) -> torch.Tensor:
        """[kv_heads * D, 2 H]: what is taken of an entry, its embedding in the first half."""
        shape = self.shapes["midlayer.self_attn.v_proj.weight"]
        return self._random("values", shape, 1 / math.sqrt(self._hidden))

    def _for_every_head(self, rows: torch.Tensor) -> torch.Tensor:
        """[kv_heads * D, n] -> [heads * D, n]: the heads of a group do the same."""
        group = self._heads // self._kv_heads
        return rows.view(self._kv_heads, self._head_dim, -1).repeat_interleave(group, dim=0).flatten(0, 1)

    def _output(self) -> torch.Tensor:
        values = self._values()[:, : self._hidden].float()
        embedding = self._target.embedding((self._vocab, self._hidden))[: self._draft_vocab].float()
        seen = torch.nn.functional.normalize((embedding @ values.T) @ values, dim=-1) * (
            _LOGIT / math.sqrt(self._hidden)
        )
        first, second = self._agreement.choices(self._vocab)
        size = self._draft_vocab
        assert max(first[:size].max(), second[:size].max()) < size, "the chain leaves the draft's vocabulary"
        return spread_rows(seen, first[:size], second[:size]).to(self._target.dtype)

    def _random(self, name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        return self._target.normal(f"eagle3.{name}", shape, deviation)


def spread_rows(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[V, H]: row c of `rows` added to row first[c], and, weaker, to row second[c]."""
    head = torch.zeros_like(rows)
    head.index_add_(0, first.to(rows.device), rows)
    return head.index_add_(0, second.to(rows.device), rows, alpha=_SECOND)
