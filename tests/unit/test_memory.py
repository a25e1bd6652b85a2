"""How many KV blocks fit beside what captured steps will hold."""

from __future__ import annotations

import pytest
import torch

from ssd_ascend.backends.base import AttentionBackend, Memory
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.errors import ConfigError
from ssd_ascend.runtime.graphs import captured_tokens
from ssd_ascend.runtime.memory import graph_bytes, num_kv_blocks
from tests.backends.conformance import spec_of
from tests.unit.test_graphs import Captures

GB = 10**9


def blocks(*, free: int = 10 * GB, reserved: int = 0, sequences: int = 1000) -> int:
    return num_kv_blocks(
        block_bytes=GB // 100,
        block_size=16,
        max_model_len=160,
        max_num_seqs=sequences,
        memory=Memory(free=free, total=16 * GB),
        host_memory=False,
        reserved=reserved,
    )


def test_what_captured_steps_hold_is_left_free() -> None:
    assert blocks() == 900
    assert blocks(reserved=GB) == 800
    assert blocks(reserved=GB, sequences=3) == 30


def test_without_room_beside_them_the_reservation_is_named() -> None:
    with pytest.raises(ConfigError, match=r"9\.00 of them reserved for captured steps"):
        blocks(reserved=9 * GB)


class _Working:
    """Attention with a workspace."""

    def workspace_bytes(self, tokens: int, max_len: int) -> int:
        return 1000 * tokens + max_len


def test_steps_hold_their_logits_and_share_a_workspace() -> None:
    backend = load_backend("cpu")
    plain = backend.attention(spec_of(4, 2, 16, 16, torch.float32), backend.device(0))
    assert graph_bytes((), vocab_size=100, attention=plain, max_len=64) == 0
    assert graph_bytes((8, 2), vocab_size=100, attention=plain, max_len=64) == 4 * 100 * 10
    working: AttentionBackend = _Working()  # type: ignore[assignment]
    assert graph_bytes((8, 2), vocab_size=100, attention=working, max_len=64) == 4 * 100 * 10 + 8 * 1000 + 64


def test_only_steps_captured_beforehand_count() -> None:
    inner = load_backend("cpu")
    assert sorted(captured_tokens(Captures(inner), 2, 3)) == [1, 2, 4, 8]  # type: ignore[arg-type]
    assert captured_tokens(Captures(inner, padded=False), 2, 3) == ()  # type: ignore[arg-type]
