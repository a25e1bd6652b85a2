"""EAGLE-3 heads as their producers write them: config, names on disk, and what it all comes down to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engine.eagle3_reference import Dialect
from tests.toys import Tensors, eagle3_config, eagle3_tensors, llama_config, speculators_config, write_checkpoint

TARGET = llama_config(num_hidden_layers=6)


def identity(tensors: Tensors) -> Tensors:
    return tensors


def renamed(rule: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {rule(name): tensor for name, tensor in tensors.items()}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def plus(**shapes: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    """More tensors, near one, dots written as `__`."""
    random = torch.Generator().manual_seed(2)
    extra = {name.replace("__", "."): 1 + 0.3 * torch.randn(s, generator=random) for name, s in shapes.items()}
    return lambda tensors: {**tensors, **extra}


@dataclass
class Case:
    """A dialect: its config, how its tensors differ from the flat names, and what it all comes down to."""

    config: dict[str, Any]
    edit: Callable[[Tensors], Tensors] = identity
    means: Dialect = field(default_factory=Dialect)
    capture: tuple[int, ...] = (1, 2, 3)
    pickled: bool = False


def flat(**changes: Any) -> dict[str, Any]:
    return eagle3_config(TARGET, **changes)


def nested(**changes: Any) -> dict[str, Any]:
    return speculators_config(TARGET, **changes)


def silent(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


CASES: dict[str, Case] = {
    "specforge": Case(flat()),
    "safeailab": Case(silent(flat(), "rope_theta", "eagle_config"), capture=(2, 3, 3), pickled=True),
    "speculators": Case(
        nested(),
        lambda w: plus(embed_tokens__weight=(96, 32))(renamed(lambda n: n.replace("midlayer.", "layers.0."))(w)),
        Dialect(norm_before_residual=True),
    ),
    "speculators-residual-unnormed": Case(nested(norm_before_residual=False)),
    "speculators-norm-before-fc": Case(
        nested(norm_before_fc=True), plus(input_norm__weight=(96,)), Dialect(norm_before_residual=True)
    ),
    "speculators-eagle-3.1": Case(
        nested(norm_output=True, fc_norm=True),
        plus(**{f"fc_norm__{i}__weight": (32,) for i in range(3)}),
        Dialect(norm_before_residual=True, recycle_normed=True),
    ),
    "specforge-fc-norm": Case(flat(fc_norm=True), plus(**{f"fc_norm__{i}__weight": (32,) for i in range(3)})),
    "specforge-logits-unnormed": Case(flat(norm_output=False), means=Dialect(norm_output=False)),
    "nvidia": Case(
        flat(
            eagle_config={
                "norm_before_fc": True,
                "return_hidden_post_norm": True,
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            }
        ),
        plus(input_norm__weight=(96,)),
        Dialect(recycle_normed=True),
    ),
    "angelslim-head-dim": Case(flat(head_dim=5, num_key_value_heads=1), means=Dialect(kv_heads=1)),
    "qwen-style": Case(
        flat(),
        plus(midlayer__self_attn__q_norm__weight=(8,), midlayer__self_attn__k_norm__weight=(8,), fc__bias=(32,)),
    ),
    "wrapped-names": Case(flat(), renamed(lambda n: n if n in ("d2t", "t2d") else f"eagle3_model.model.{n}")),
    "vllm-names": Case(
        flat(), lambda w: without("t2d")(renamed(lambda n: {"d2t": "draft_id_to_target_id"}.get(n, n))(w))
    ),
    "layer-inputs": Case(flat(eagle_config={"eagle_aux_hidden_state_layer_inputs": [2, 3, 6]}), capture=(2, 3, 6)),
    "whole-vocabulary": Case(flat(draft_vocab_size=96), without("d2t", "t2d", "lm_head.weight")),
    "biases": Case(flat(attention_bias=True, mlp_bias=True)),
}


def tensors_of(case: Case) -> Tensors:
    """What the head's file holds; its head_dim is 8, whatever the config says."""
    flat_config = "hidden_size" in case.config
    return case.edit(eagle3_tensors({**case.config, "head_dim": 8} if flat_config else case.config, TARGET))


def write_head(directory: Path, case: Case, **options: Any) -> Path:
    tensors = tensors_of(case)
    if not case.pickled:
        return write_checkpoint(directory, case.config, tensors, **options)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(case.config))
    torch.save(tensors, directory / "pytorch_model.bin")
    return directory
