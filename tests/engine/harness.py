"""Tiny pairs of target and draft, and what it takes to run an engine over them to the end."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.builder import build_engine
from ssd_ascend.engine.engine import Engine
from tests.toys import (
    causal_lm_tensors,
    eagle3_config,
    eagle3_tensors,
    llama_config,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    write_checkpoint,
)

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
DTYPE = os.environ.get("TEST_DTYPE", "float32")
"""`pytest tests/engine --device cuda` runs the same tests on a card (in bfloat16), whose logits are bitwise the same in
any batch; `--device npu` on an NPU, or an emulated one (in float16)."""
BLOCK = 128 if DEVICE == "npu" else 16
"""Tokens of a KV block: the edges these tests walk along. An NPU has larger ones only."""
FAMILIES = {"llama": llama_config, "qwen2": qwen2_config, "qwen3": qwen3_config, "qwen3_moe": qwen3_moe_config}


def needs_devices(count: int, device: str = DEVICE) -> None:
    """Skip the calling test where the machine has fewer."""
    there = load_backend(device).num_devices()
    if there is not None and there < count:
        pytest.skip(f"needs {count} devices, and there are {there}")


def dtype_across_ranks() -> str:
    """For comparing different numbers of ranks: a sum is rounded once a rank, which 16 bits turn into other tokens.

    Skips the calling test where a device serves nothing wider.
    """
    if torch.float32 not in load_backend(DEVICE).capabilities.dtypes:
        pytest.skip("different numbers of ranks are compared in float32, which this device does not serve")
    return "float32"


def write_pair(directory: Path, family: str, *, vocab: int = 24, noise: float = 0.05, eos: int = 2) -> Path:
    """`target`, a `model` draft (the target, slightly off) and an `eagle3` head, in sub-folders.

    The vocabulary is small so that even a random head is right now and then.
    """
    config = FAMILIES[family](vocab_size=vocab, eos_token_id=eos, max_position_embeddings=512)
    tensors = causal_lm_tensors(config)
    write_checkpoint(directory / "target", config, tensors)
    generator = torch.Generator().manual_seed(7)
    off = {
        name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1
        else tensor
        for name, tensor in tensors.items()
    }
    write_checkpoint(directory / "model", config, off)
    head = eagle3_config(config, max_position_embeddings=512)
    write_checkpoint(directory / "eagle3", head, eagle3_tensors(head, config))
    return directory


def draft_of(pair: Path, drafter: str) -> str | None:
    """The weights of a drafter in a pair; None for one that has none."""
    path = pair / drafter
    return str(path) if path.is_dir() else None


def speculation(pair: Path, speculator: str, drafter: str = "model", **options: Any) -> SpeculationConfig:
    """A configuration over a pair, with the worker in this process unless told otherwise, or others draft."""
    return SpeculationConfig(
        **{
            "speculator": speculator,
            "drafter": drafter,
            "draft": draft_of(pair, drafter),
            "lookahead": 4,
            "fan_out": 2,
            "worker": "auto" if "speculators" in options else "inprocess",
            **options,
        }
    )


def make_engine(pair: Path, config: SpeculationConfig | None = None, **options: Any) -> Engine:
    """An engine with a small cache; on the CPU and in float32 unless the environment says otherwise."""
    return build_engine(
        EngineConfig(
            **{
                "model": str(pair / "target"),
                "dtype": DTYPE,
                "device": DEVICE,
                "block_size": None if options.get("device", DEVICE) == "npu" else BLOCK,
                "max_num_seqs": 8,
                "max_batched_tokens": 256,
                "num_kv_blocks": 256,
                "speculation": config or SpeculationConfig(),
                **options,
            }
        )
    )


@dataclass(frozen=True)
class Run:
    """What came out: tokens and last words by prompt index, and the counters."""

    tokens: list[list[int]]
    last: list[TokenDelta]
    deltas: list[list[TokenDelta]]
    stats: EngineStats


def drive(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]) -> Run:
    """Submit everything, step to the end."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    for i, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        engine.submit(EngineRequest(id=i, prompt_token_ids=list(prompt), sampling=params))
    deltas: dict[int, list[TokenDelta]] = {i: [] for i in range(len(prompts))}
    for _ in range(100_000):
        if not engine.has_work:
            break
        for delta in engine.step():
            deltas[delta.seq_id].append(delta)
    assert not engine.has_work, "the engine never finished"
    ordered = [deltas[i] for i in range(len(prompts))]
    tokens = [[token for delta in own for token in delta.token_ids] for own in ordered]
    return Run(tokens, [own[-1] for own in ordered], ordered, engine.stats())


def run(
    pair: Path,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    config: SpeculationConfig | None = None,
    **options: Any,
) -> Run:
    """Build, drive, close."""
    engine = make_engine(pair, config, **options)
    try:
        return drive(engine, prompts, sampling)
    finally:
        engine.close()


def prompts_of(lengths: Sequence[int], vocab: int = 24, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, without the end-of-sequence token."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def around(length: int) -> int:
    """A length that lies around blocks of this device as `length` lies around blocks of 16."""
    block, inside = divmod(length, 16)
    return block * BLOCK + inside if inside <= 8 else (block + 1) * BLOCK - (16 - inside)


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    """Greedy, past the end-of-sequence token unless told otherwise, so that runs are long."""
    params: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **options}
    return SamplingParams(**params)
