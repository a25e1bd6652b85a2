"""Memory of one GPU that the others of this host read and write directly: each shares a block, and sees all blocks.

Under it lies torch's symmetric memory, without multicast. Used by `sums.py`.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import _SymmetricMemory

from ssd_ascend.errors import TransportError, first_line


class PeerMemory:
    """`blocks[r]`: rank r's block, uint8 [num_bytes], zeros at first, as this rank's own device addresses it."""

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, *, num_bytes: int) -> None:
        """Every rank of the group calls this with the same size. TransportError where devices cannot reach each
        other."""
        _must_share_a_host(group)
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


def _must_share_a_host(group: distributed.ProcessGroup) -> None:
    hosts: list[Any] = [None] * group.size()
    distributed.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        raise TransportError(f"devices of {len(set(hosts))} hosts share no memory")
