"""Synthetic models: their checkpoints load, and those with noise follow one chain, the better the less noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.agreement import Weights, successor
from bench.shapes import SHAPES, shape
from bench.synthetic import build, write
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.model import model_config_from_hf
from ssd_ascend.core.batch import Mode
from ssd_ascend.errors import ConfigError
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.load import CacheSize
from ssd_ascend.weights.loader import read_config

VOCAB = 211
SIZE = CacheSize(max_model_len=256, max_num_seqs=1, num_blocks=20)


def small(name: str = "llama-3.1-8b", **more: Any) -> dict[str, Any]:
    """A public shape, shrunk."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
    }
    return {**shape(name, layers=2), **sizes, "tie_word_embeddings": False, **more}


def followers(noise: float, seed: int) -> torch.Tensor:
    """The greedy token after each of a text's tokens."""
    backend = load_backend("cpu")
    runner, _ = build(small(), backend, backend.device(0), size=SIZE, dtype=torch.float32, seed=seed, noise=noise)
    text = list(range(VOCAB))
    batch = build_batch(
        Mode.PREFILL, [Row(text, 0, list(range(16)), VOCAB)], block_size=runner.block_size, device=runner.device
    )
    return runner.forward(batch).logits.argmax(-1)


def test_without_noise_every_model_follows_the_chain() -> None:
    for seed in (0, 1):
        assert torch.equal(followers(0.0, seed), successor(VOCAB))


def test_noise_lowers_agreement() -> None:
    target = followers(0.1, 0)
    agreement = [(followers(noise, 1) == target).float().mean().item() for noise in (0.0, 0.7, 30.0)]
    assert agreement[0] > agreement[1] > agreement[2]
    assert agreement[0] > 0.9
    assert agreement[2] < 0.2


def test_noise_needs_a_head_of_its_own() -> None:
    config = model_config_from_hf(small(tie_word_embeddings=True), where="test")
    with pytest.raises(ConfigError, match="output layer of its own"):
        Weights(config, torch.device("cpu"), torch.float32, seed=0, noise=0.1)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_checkpoints_load_and_hold_what_build_makes(tmp_path: Path, name: str) -> None:
    write(small(name), tmp_path, noise=0.3, seed=4)
    assert read_config(tmp_path).num_layers == 2
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    weights = Weights(read_config(tmp_path), torch.device("cpu"), torch.bfloat16, seed=4, noise=0.3)
    key = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(weights.tensor(key, tuple(tensors[key].shape)), tensors[key])
    assert torch.equal(tensors["lm_head.weight"][successor(VOCAB)[3]], tensors["model.embed_tokens.weight"][3] * 0.25)


def test_shapes_are_the_public_ones() -> None:
    """Parameters in billions, as the models' cards give them."""
    billions = {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.2-1b": 1.24, "qwen3-0.6b": 0.6, "qwen3-32b": 32.8}
    for name, expected in billions.items():
        config = model_config_from_hf(SHAPES[name], where=name)
        attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
        layer = attention + 3 * config.hidden_size * config.intermediate_size
        tables = 1 if config.tie_word_embeddings else 2
        total = config.num_layers * layer + tables * config.vocab_size * config.hidden_size
        assert total / 1e9 == pytest.approx(expected, rel=0.01)
