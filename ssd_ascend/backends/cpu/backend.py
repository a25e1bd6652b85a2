"""`CpuBackend`: the CPU behind the device seam; loaded by name through `backends/registry.py`.

Compiled kernels where a C++ compiler is at hand, plain torch otherwise; both answer alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ssd_ascend.backends.base import AttentionBackend, AttentionSpec, Capabilities, GraphCapture, Memory, Ops
from ssd_ascend.backends.cpu import machine, native
from ssd_ascend.backends.cpu.attention import PlainAttention
from ssd_ascend.backends.cpu.graphs import CpuGraphs
from ssd_ascend.backends.cpu.native.attention import NativeAttention, supports
from ssd_ascend.backends.cpu.native.ops import NativeOps
from ssd_ascend.backends.cpu.ops import PlainOps


class CpuBackend:
    """All cores of this machine as one device; any device index means the same CPU."""

    name: str = "cpu"
    device_type: str = "cpu"
    collective: str = "gloo"

    def __init__(self) -> None:
        self._library = native.load()
        self.ops: Ops = NativeOps(self._library) if self._library else PlainOps()
        self.capabilities = Capabilities(
            graphs=self._library is not None,
            padded_graphs=False,
            tree_mask=True,
            device_lengths=True,
            peer_transfer=False,
            block_sizes=(16, 32, 64, 128, 256),
            dtypes=(torch.bfloat16, torch.float32, torch.float16),
            max_verify_tokens=None,
            row_invariant=self._library is not None,
            host_memory=True,
            wide_activations=self._library is not None,
        )

    def num_devices(self) -> int | None:
        """One, that any number of processes may share."""
        return None

    def device(self, index: int) -> torch.device:
        """The CPU, whatever the index."""
        return torch.device("cpu")

    def describe(self, device: torch.device) -> str:
        """Such as "cpu: AMD EPYC, 2 threads, avx2"."""
        return machine.description()

    def memory(self, device: torch.device) -> Memory:
        """Free and total bytes, within the limits of the container."""
        return machine.memory()

    def attention(self, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
        """Paged attention of one model."""
        if self._library and supports(spec):
            return NativeAttention(self._library, spec)
        return PlainAttention(spec)

    def graphs(self, device: torch.device) -> GraphCapture | None:
        """Tapes of compiled kernels; None without those."""
        return CpuGraphs(self._library) if self._library else None

    def stream(self) -> AbstractContextManager[Any]:
        """Nothing: work runs where it is called."""
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """Nothing is queued."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors themselves: they are on the host already."""
        return list(tensors)
