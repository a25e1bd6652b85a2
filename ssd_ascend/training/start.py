"""First weights of a head: taken from the target, whose last layer does half of the work already, or random."""

from __future__ import annotations

import torch

from ssd_ascend.config.training import Start
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.runtime.load import make_context
from ssd_ascend.training.head import ATTENTION, LM_HEAD, MLP, HeadShape
from ssd_ascend.training.target import Target
from ssd_ascend.training.vocabulary import DraftVocabulary
from ssd_ascend.weights.loader import open_source


def first_weights(
    shape: HeadShape, target: Target, vocabulary: DraftVocabulary, *, start: Start, seed: int
) -> dict[str, torch.Tensor]:
    """Float32 weights that want gradients, on the target's device.

    From the target: its last layer reads the feature half of the input and ignores the embedding, `fc` hands on the
    last captured layer, norm and vocabulary head are the target's own.
    """
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=random) * size[-1] ** -0.5
        for name, size in shape.shapes().items()
    }
    if start == "target":
        weights |= _from_target(shape, target, weights)
        weights[LM_HEAD] = target.lm_head[vocabulary.to_target.to(target.device)].float()
    return {name: weight.to(target.device, torch.float32).clone().requires_grad_() for name, weight in weights.items()}


def _from_target(shape: HeadShape, target: Target, random: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    config, backend = shape.target, target.backend
    block = target.loaded.runner.block_size
    ctx = make_context(config, backend, target.device, SingleRank(), dtype=target.loaded.dtype, block_size=block)
    prefix, hidden = f"model.layers.{config.num_layers - 1}.", config.hidden_size
    found: dict[str, torch.Tensor] = {}
    with open_source(target.path, config, ctx) as source:

        def read(name: str) -> torch.Tensor:
            return source.read(name).float()

        for name in "qkv":
            # a little of the random weights beside it: from zero, the embedding would be late to be heard
            beside = random[f"{ATTENTION}{name}_proj.weight"][:, :hidden] * 0.1
            found[f"{ATTENTION}{name}_proj.weight"] = torch.cat(
                (beside, read(f"{prefix}self_attn.{name}_proj.weight")), 1
            )
        found[f"{ATTENTION}o_proj.weight"] = read(f"{prefix}self_attn.o_proj.weight")
        for name in ("gate", "up", "down"):
            found[f"{MLP}{name}_proj.weight"] = read(f"{prefix}mlp.{name}_proj.weight")
        found["midlayer.hidden_norm.weight"] = read(f"{prefix}input_layernorm.weight")
        found["midlayer.post_attention_layernorm.weight"] = read(f"{prefix}post_attention_layernorm.weight")
        found["norm.weight"] = read("model.norm.weight")
    fc = torch.zeros(hidden, len(shape.capture_layers) * hidden)
    fc[:, -hidden:] = torch.eye(hidden)
    found["fc.weight"] = fc
    return found
