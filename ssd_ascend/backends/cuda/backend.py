"""`CudaBackend`: NVIDIA GPUs behind the device seam; loaded by name through `backends/registry.py`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ssd_ascend.backends.base import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    Collectives,
    GraphCapture,
    Memory,
    Ops,
    SmallSums,
)
from ssd_ascend.backends.cuda import shared_tensor
from ssd_ascend.backends.cuda.attention import PagedAttention
from ssd_ascend.backends.cuda.graphs import CudaGraphs
from ssd_ascend.backends.cuda.kernels.launch import compiling
from ssd_ascend.backends.cuda.ops import CudaOps
from ssd_ascend.backends.cuda.sums import small_sums
from ssd_ascend.errors import ConfigError

_OLDEST = (8, 0)
_OVERLAPS_FROM = _COPIES_IN_BULK_FROM = (9, 0)


class CudaBackend:
    """The GPUs torch sees; kernels in Triton, so that they are read and changed in one language."""

    name: str = "cuda"
    device_type: str = "cuda"
    collective: str = "nccl"

    def __init__(self) -> None:
        capability = _capability()
        self._overlap = capability >= _OVERLAPS_FROM
        self.ops: Ops = CudaOps(overlap=self._overlap, bulk=capability >= _COPIES_IN_BULK_FROM)
        self.capabilities = Capabilities(
            graphs=True,
            tree_mask=True,
            device_lengths=True,
            peer_transfer=True,
            block_sizes=(64, 16, 32, 128, 256),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            max_verify_tokens=None,
            row_invariant=True,
            streams_overlap=True,
        )

    def num_devices(self) -> int:
        """Those that this process may see."""
        return torch.cuda.device_count()

    def device(self, index: int) -> torch.device:
        """The index-th GPU, made current; ConfigError when there are fewer."""
        if index >= self.num_devices():
            raise ConfigError(
                f"there is no GPU {index}: this machine has {self.num_devices()}",
                remedy="ask for fewer devices, or check CUDA_VISIBLE_DEVICES",
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device

    def describe(self, device: torch.device) -> str:
        """Such as "cuda: NVIDIA H200"."""
        return f"cuda: {torch.cuda.get_device_name(device)}"

    def memory(self, device: torch.device) -> Memory:
        """Free and total bytes; what torch's allocator holds without using it counts as free."""
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(free=free + idle, total=total)

    def attention(self, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
        """Paged attention of one model."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return PagedAttention(spec, device, processors=processors, overlap=self._overlap)

    def graphs(self, device: torch.device) -> GraphCapture | None:
        """CUDA graphs."""
        return CudaGraphs(device)

    def compiling(self) -> AbstractContextManager[None]:
        """See `CompilingBackend`."""
        return compiling()

    def share(self, tensor: torch.Tensor) -> str:
        """See `SharingBackend`."""
        return shared_tensor.share(tensor)

    def open_shared(self, text: str, device: torch.device) -> torch.Tensor:
        """See `SharingBackend`."""
        return shared_tensor.open_shared(text, device)

    def small_sums(self, collectives: Collectives, device: torch.device) -> SmallSums | None:
        """Through memory that the GPUs share; see `SummingBackend`."""
        return small_sums(collectives, device, overlap=self._overlap)

    def stream(self) -> AbstractContextManager[Any]:
        """A stream of its own for the work queued inside."""
        return torch.cuda.stream(torch.cuda.Stream())

    def synchronize(self, device: torch.device) -> None:
        """Wait for everything queued."""
        torch.cuda.synchronize(device)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All tensors packed into one copy; returns when it has arrived."""
        # widest numbers first, so that every piece of the packed bytes is aligned for its own type
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        flat = [tensors[i].reshape(-1).view(torch.uint8) for i in order]
        gathered = flat[0] if len(flat) == 1 else torch.cat(flat)
        packed = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
        packed.copy_(gathered, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        arrived: list[torch.Tensor] = [packed] * len(tensors)
        for i, piece in zip(order, packed.split([part.numel() for part in flat]), strict=True):
            arrived[i] = piece.view(tensors[i].dtype).view(tensors[i].shape)
        return arrived


def _capability() -> tuple[int, int]:
    """Of the first GPU; ConfigError when there is none that the kernels run on."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "no NVIDIA GPU is usable: torch reports no CUDA device",
            remedy="check nvidia-smi and that torch was built for CUDA, or use --device cpu",
        )
    capability = torch.cuda.get_device_capability(0)
    if capability < _OLDEST:
        raise ConfigError(
            f"GPU 0 has compute capability {capability[0]}.{capability[1]}; the kernels need {_OLDEST[0]}.{_OLDEST[1]}",
            remedy="use an A100 or newer, or --device cpu",
        )
    return capability
