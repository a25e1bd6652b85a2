"""Memory of one GPU that the others of this host read and write directly: each shares a block, and sees all blocks.

Under it lies torch's symmetric memory, without multicast. Used by `sums.py`.
"""

from __future__ import annotations

import socket
from typing import Any, ClassVar

import torch
from torch import distributed
from torch._C._distributed_c10d import _SymmetricMemory

from ssd_ascend.errors import TransportError, first_line


class PeerMemory:
    """`blocks[r]`: rank r's block, uint8 [num_bytes], zeros at first, as this rank's own device addresses it."""

    _meetings: ClassVar[int] = 0
    """How often this process has met others here."""

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, *, num_bytes: int) -> None:
        """Every rank of the group calls this with the same size. TransportError where devices cannot reach each
        other."""
        _must_be_alike(group, PeerMemory._meetings)
        PeerMemory._meetings += 1
        try:
            shared: Any = _SymmetricMemory
            self._own = shared.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            self._own.zero_()
            torch.cuda.synchronize(device)
            self._handle = shared.rendezvous(self._own, group.group_name)
            self.blocks = [self._handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
        except RuntimeError as error:
            raise TransportError(f"no memory shared between {group.size()} devices: {first_line(error)}") from error
        distributed.barrier(group=group)  # nobody writes before all blocks are zeros


def _must_be_alike(group: distributed.ProcessGroup, meetings: int) -> None:
    """TransportError, on all ranks, where the library below would not find all of them.

    It numbers meetings by the process instead of by the group (https://github.com/pytorch/pytorch/issues/196082): a
    process that has been at one before, as has one that builds its second engine, waits for new ones for five minutes,
    and they for it.
    """
    found: list[Any] = [None] * group.size()
    distributed.all_gather_object(found, (socket.gethostname(), meetings), group=group)
    hosts, counts = ({one[i] for one in found} for i in range(2))
    if len(hosts) > 1:
        raise TransportError(f"devices of {len(hosts)} hosts share no memory")
    if len(counts) > 1:
        raise TransportError(
            f"processes that shared memory {min(counts)} and {max(counts)} times before do not find each other",
            remedy="build the engine in a process of its own, if the speed of its sums matters",
        )
