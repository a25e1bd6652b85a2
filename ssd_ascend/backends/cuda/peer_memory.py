"""Memory of one GPU that the others of this host read and write directly: each shares a block, and sees all blocks.

Under it lies torch's symmetric memory, without multicast. Used by `sums.py`.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import _SymmetricMemory

from ssd_ascend.errors import TransportError


class PeerMemory:
    """`blocks[r]`: rank r's block, uint8 [num_bytes], zeros at first, as this rank's own device addresses it."""

    def __init__(
        self, store: distributed.Store, rank: int, size: int, device: torch.device, *, num_bytes: int, name: str
    ) -> None:
        """Every rank calls this with the same size and name. TransportError where devices cannot reach each other."""
        _must_share_a_host(store, rank, size)
        try:
            shared: Any = _SymmetricMemory
            shared.set_group_info(name, rank, size, store)
            self._own = shared.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            self._own.zero_()
            torch.cuda.synchronize(device)
            self._handle = shared.rendezvous(self._own, name)
            self.blocks = [self._handle.get_buffer(other, (num_bytes,), torch.uint8) for other in range(size)]
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TransportError(f"no memory shared between {size} devices: {reason}") from error


def _must_share_a_host(store: distributed.Store, rank: int, size: int) -> None:
    store.set(f"host/{rank}", socket.gethostname())
    hosts = {store.get(f"host/{other}").decode() for other in range(size)}
    if len(hosts) > 1:
        raise TransportError(f"devices of {len(hosts)} hosts share no memory")
