"""From a path to a model that runs: dtype, KV cache, attention, weights.

The builder calls it for targets, drafters for drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd_ascend.architectures.registry import CausalLM
from ssd_ascend.backends.base import Backend, Capabilities, Collectives
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.errors import ConfigError
from ssd_ascend.kv.cache import KVCache
from ssd_ascend.layers.attention import attention_spec
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.runtime.memory import graph_bytes, must_fit, num_kv_blocks
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.weights.loader import load_model, read_config

Progress = Callable[[int, int], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """How large a KV cache may be. `num_blocks` wins over `gigabytes`, which wins over what the device has free.

    captured: tokens of each step that will be captured; what those hold is left free.
    """

    max_model_len: int
    max_num_seqs: int
    num_blocks: int | None = None
    gigabytes: float | None = None
    captured: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    runner: ModelRunner
    model: CausalLM
    config: ModelConfig
    dtype: torch.dtype


def choose_dtype(wanted: str, saved: str | None, capabilities: Capabilities) -> torch.dtype:
    """The serving dtype: what was asked for, else the model's own if the device has it, else the device's favourite."""
    if wanted != "auto":
        dtype = _DTYPES[wanted]
        if dtype not in capabilities.dtypes:
            known = ", ".join(str(d).removeprefix("torch.") for d in capabilities.dtypes)
            raise ConfigError(f"this device does not serve {wanted}", remedy=f"choose one of {known}, or auto")
        return dtype
    own = _DTYPES.get(saved or "")
    return own if own in capabilities.dtypes and own is not None else capabilities.dtypes[0]


def choose_block_size(wanted: int | None, capabilities: Capabilities) -> int:
    """The KV block size: what was asked for if the device has it, else its favourite."""
    if wanted is not None and wanted not in capabilities.block_sizes:
        known = ", ".join(map(str, capabilities.block_sizes))
        raise ConfigError(f"this device has no KV blocks of {wanted} tokens", remedy=f"choose one of {known}")
    return wanted or capabilities.block_sizes[0]


def load_runner(
    path: Path,
    backend: Backend,
    device: torch.device,
    collectives: Collectives,
    *,
    dtype: torch.dtype,
    block_size: int,
    size: CacheSize,
    capture_layers: tuple[int, ...] = (),
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model at `path` and give it a KV cache. `progress(bytes done, bytes in all)` follows the weights."""
    config = read_config(path)
    ctx = make_context(config, backend, device, collectives, dtype=dtype, block_size=block_size)
    model, config = load_model(
        path, ctx, max_positions=size.max_model_len, capture_layers=capture_layers, progress=progress
    )
    collectives.barrier()  # who could not load has said so; nobody waits for it in a collective
    reserved = graph_bytes(
        size.captured, vocab_size=config.vocab_size, attention=ctx.attention, max_len=size.max_model_len
    )
    features = len(capture_layers) * config.hidden_size
    kv = make_cache(backend, ctx, config.num_layers, block_size, size, features, reserved)
    return LoadedModel(ModelRunner(model, kv, ctx.attention, device), model, config, dtype)


def make_context(
    config: ModelConfig,
    backend: Backend,
    device: torch.device,
    collectives: Collectives,
    *,
    dtype: torch.dtype,
    block_size: int,
) -> BuildContext:
    """What a model with weights of `dtype` is built with. Activations are float32 where that is free."""
    activations = torch.float32 if backend.capabilities.wide_activations else dtype
    spec = attention_spec(config, collectives, block_size=block_size, dtype=activations)
    return BuildContext(dtype, device, backend.ops, backend.attention(spec, device), collectives, activations)


def make_cache(
    backend: Backend,
    ctx: BuildContext,
    num_layers: int,
    block_size: int,
    size: CacheSize,
    feature_width: int = 0,
    reserved: int = 0,
) -> KVCache:
    """A KV cache of the size that `size` and the device's memory allow, with room for features beside it.

    reserved: bytes that must stay free.
    """
    numbers = num_layers * torch.Size(ctx.attention.kv_shape(1)).numel() + block_size * feature_width
    block_bytes, memory = numbers * ctx.activation_dtype.itemsize, backend.memory(ctx.device)
    blocks = size.num_blocks or num_kv_blocks(
        block_bytes=block_bytes,
        block_size=block_size,
        max_model_len=size.max_model_len,
        max_num_seqs=size.max_num_seqs,
        memory=memory,
        host_memory=backend.capabilities.host_memory,
        wanted_gb=size.gigabytes,
        reserved=reserved,
    )
    must_fit(blocks, block_bytes=block_bytes, memory=memory)
    return KVCache(
        ctx.attention,
        num_layers=num_layers,
        num_blocks=_agreed(blocks, ctx),
        block_size=block_size,
        dtype=ctx.activation_dtype,
        device=ctx.device,
        feature_width=feature_width,
    )


def _agreed(blocks: int, ctx: BuildContext) -> int:
    """The least that any rank has room for: block numbers mean the same on all of them."""
    if ctx.collectives.size == 1:
        return blocks
    return int(ctx.collectives.all_gather(torch.tensor([blocks], device=ctx.device), dim=0).min())
