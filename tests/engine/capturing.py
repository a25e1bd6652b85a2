"""A backend that claims to capture, and to work while the host goes on: its graphs are the functions, run again.

So static memory, padding and what is queued ahead are tested on any machine; a GPU runs the same tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.engine import builder
from tests.engine.harness import DEVICE


class _Again:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class _Captures:
    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.capabilities = replace(inner.capabilities, graphs=True, padded_graphs=True, host_memory=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def graphs(self, device: torch.device) -> _Captures:
        return self

    def capture(self, run: Callable[[], None]) -> _Again:
        run()
        return _Again(run)


def capture_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on capture whatever the device."""
    if DEVICE == "cpu":
        monkeypatch.setenv("SSD_CPU_KERNELS", "0")
        monkeypatch.setattr(builder, "load_backend", lambda name: _Captures(load_backend(name)))
