"""Numbers that no machine survives are refused before anything is started."""

from __future__ import annotations

import os

import pytest

from ssd_ascend.backends.base import Memory
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.errors import ConfigError
from ssd_ascend.runtime.memory import must_fit
from ssd_ascend.serve.config import ServerConfig


def test_threads_are_as_many_as_a_machine_bears() -> None:
    cores = os.cpu_count() or 1
    assert EngineConfig(model="m", threads=cores).threads == cores
    with pytest.raises(ConfigError, match=rf"threads is 1000000, and this machine has {cores} cores"):
        EngineConfig(model="m", threads=1_000_000)
    with pytest.raises(ConfigError, match="draft_threads is 1000000"):
        SpeculationConfig(draft_threads=1_000_000)
    with pytest.raises(ConfigError, match="draft_threads is 0: it must be at least 1"):
        SpeculationConfig(draft_threads=0)


def test_a_cache_is_no_larger_than_its_device() -> None:
    memory = Memory(free=10**9, total=2 * 10**9)
    must_fit(20, block_bytes=10**8, memory=memory)
    with pytest.raises(ConfigError, match=r"a KV cache of 21 blocks takes 2\.1 GB, and this device has 2\.0"):
        must_fit(21, block_bytes=10**8, memory=memory)


@pytest.mark.parametrize("origin", ["https://chat.example", "http://[::1]:8080", "app://page", "null", "*"])
def test_what_a_browser_calls_itself(origin: str) -> None:
    assert ServerConfig(cors_origins=(origin,)).cors_origins == (origin,)


@pytest.mark.parametrize("origin", ["evil", "https://chat.example/", "https://a b", "", "chat.example:80"])
def test_what_no_browser_calls_itself(origin: str) -> None:
    with pytest.raises(ConfigError, match="which no browser calls itself"):
        ServerConfig(cors_origins=(origin,))
