"""Rank 0 gathers the other ranks of a target (`--tp`). Called by the builder; what the others do is `rank.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ssd_ascend.backends.base import Backend, StoppingBackend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.distributed.launch import Place, Ranks, lead, torchrun_place
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.attention import attention_spec
from ssd_ascend.layers.sharding import even_shard
from ssd_ascend.log import get_logger

_ENTRY = "ssd_ascend.engine.rank:main"
_log = get_logger(__name__)


def gather_ranks(config: EngineConfig, backend: Backend, model: ModelConfig) -> Ranks | None:
    """The other ranks, started here or found under `torchrun`; None when the target has one rank.

    Raises ConfigError when the model cannot be shared so, WorkerError when a rank does not come up.
    """
    size = config.tensor_parallel
    if size == 1:
        return None
    _check_shares(model, size)
    place = torchrun_place(size)
    if place is not None and place.rank != 0:
        raise ConfigError(
            f"this process is rank {place.rank} of {size}, which follows rank 0",
            remedy="call ssd_ascend.engine.rank.follow(config) in it",
        )
    if place is None:
        _check_devices(backend, size)
    config = with_thread_share(config, backend, place)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _log.info("gathering %d ranks", size)
    device = backend.device(0 if place is None else place.local_rank)
    ranks = lead(backend.collective, device, size, entry=_ENTRY, config=to_plain(config), place=place)
    if isinstance(backend, StoppingBackend):
        ranks.collectives.wake_by(partial(backend.stop, device))
    return ranks


def with_thread_share(config: EngineConfig, backend: Backend, place: Place | None) -> EngineConfig:
    """Ranks of our own that compute on one host's processors share them; else the configuration as it is."""
    if config.threads is not None or place is not None or not backend.capabilities.host_memory:
        return config
    return replace(config, threads=max(1, torch.get_num_threads() // config.tensor_parallel))


def _check_devices(backend: Backend, size: int) -> None:
    """ConfigError, in the backend's words, when ranks of our own would find no device."""
    there = backend.num_devices()
    if there is not None and there < size:  # else nothing is asked: a device that was made current holds memory
        backend.device(size - 1)


def _check_shares(model: ModelConfig, size: int) -> None:
    """ConfigError before any process is started."""
    ranks = SingleRank()
    ranks.size = size
    attention_spec(model, ranks, block_size=1, dtype=torch.float32)
    sparse = model.num_layers - len(model.experts.dense_layers) if model.experts is not None else 0
    if sparse < model.num_layers:
        even_shard(model.intermediate_size, ranks, what="intermediate_size")
    if model.experts is not None:
        even_shard(model.experts.intermediate_size, ranks, what="moe_intermediate_size")


def to_plain(config: EngineConfig) -> dict[str, Any]:
    """The configuration as JSON can hold it."""
    return dataclasses.asdict(config)


def from_plain(values: Mapping[str, Any]) -> EngineConfig:
    """The inverse of `to_plain`, also after JSON made lists of tuples."""
    speculation: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values["speculation"].items()
    }
    return EngineConfig(**{**values, "speculation": SpeculationConfig(**speculation)})
