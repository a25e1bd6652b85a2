"""Tensor parallelism without processes: the ranks run as threads, and together say what one rank says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.weights.loader import load_model, read_config
from tests.toys import build_context, llama_config, prefill_batch, qwen3_config, qwen3_moe_config, run, write_checkpoint

IDS = [(5 * i * i + i) % 90 for i in range(20)]


class ThreadRanks:
    """`Collectives` of one of several threads that share `seats` and a barrier."""

    def __init__(self, rank: int, seats: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(seats)
        self._seats, self._barrier = seats, barrier

    def _everyone(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._seats[self.rank] = x
        self._barrier.wait(timeout=300)
        tensors = [seat for seat in self._seats if seat is not None]
        self._barrier.wait(timeout=300)
        return tensors

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._everyone(x)).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._everyone(x), dim=dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self._everyone(x)[src]

    def barrier(self) -> None:
        self._barrier.wait(timeout=300)


def logits_of(path: Path, size: int) -> list[torch.Tensor]:
    """Each rank's logits."""
    seats: list[torch.Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def one(rank: int) -> torch.Tensor:
        config = read_config(path)
        ctx = build_context(config, collectives=ThreadRanks(rank, seats, barrier))
        model, _ = load_model(path, ctx, max_positions=64)
        return run(model, ctx, config.num_layers, prefill_batch(IDS)).logits

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "config",
    [
        llama_config(attention_bias=True, mlp_bias=True, vocab_size=97),
        qwen3_config(tie_word_embeddings=True, vocab_size=91),
        llama_config(num_key_value_heads=1),
        qwen3_moe_config(),
    ],
    ids=["biases", "tied", "one-kv-head", "experts"],
)
def test_ranks_agree_with_a_single_one(config: dict[str, Any], size: int, tmp_path: Path) -> None:
    """With 2 key-value heads, 4 ranks hold copies; a vocabulary of 97 or 91 leaves padding on the last rank."""
    write_checkpoint(tmp_path, config)
    (alone,) = logits_of(tmp_path, 1)
    for logits in logits_of(tmp_path, size):
        assert logits.shape == alone.shape
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


def test_heads_that_cannot_be_shared_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama_config())
    with pytest.raises(ConfigError, match="attention heads is 4, which 3 ranks cannot share"):
        logits_of(tmp_path, 3)
