"""HCCL between a target and its draft worker: `transport.device.Exchange` over two groups of two ranks.

A group for each direction, because one communicator takes its sends and receives strictly in turn. Both are warmed when
they are made: the first message of a pair builds the communicator, which takes seconds. HCCL_BUFFSIZE would be taken
twice for each group, so these get small ones. Made by `backend.meet`.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch_npu
from torch import distributed
from torch_npu._C._distributed_c10d import ProcessGroupHCCL

from ssd_ascend.errors import TransportError, first_line

_BUFFER_MB: Final = 20
_POLL_S: Final = 2e-5


class HcclExchange:
    """One of two processes: what rank 0 sends goes through the first group, what rank 1 sends through the second."""

    def __init__(self, store: distributed.Store, rank: int, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self._other = 1 - rank
        groups = [_group(distributed.PrefixStore(f"from {sender}", store), rank, timeout_s) for sender in (0, 1)]
        self._out, self._in = groups[rank], groups[self._other]
        self._streams = {id(group): torch_npu.npu.Stream(device) for group in groups}
        for sender in (0, 1):
            buffer = torch.zeros(8, dtype=torch.uint8, device=device)
            if sender == rank:
                self.send(buffer, timeout_s)
            else:
                self.recv(buffer, timeout_s)

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """See `Exchange.send`."""
        self._run(self._out, "send", buffer, timeout_s)

    def recv(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """See `Exchange.recv`."""
        self._run(self._in, "recv", buffer, timeout_s)

    def _run(self, group: Any, verb: str, buffer: torch.Tensor, timeout_s: float) -> None:
        """Queue it behind what made the buffer, on a stream of its own, and look until it is done."""
        torch_npu.npu.set_device(self.device)  # threads start on device 0
        stream = self._streams[id(group)]
        stream.wait_stream(torch_npu.npu.current_stream(self.device))
        done = torch_npu.npu.Event()
        try:
            with torch_npu.npu.stream(stream):
                getattr(group, verb)([buffer], self._other, 0).wait()
                done.record(stream)
            deadline = time.monotonic() + timeout_s
            while not done.query():
                if time.monotonic() > deadline:
                    raise TransportError(f"the other side did not take part in a {verb} within {timeout_s:g} s")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise TransportError(f"HCCL {verb}: {first_line(error)}") from error


def _group(store: distributed.Store, rank: int, timeout_s: float) -> Any:
    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": _BUFFER_MB}
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupHCCL(store, rank, 2, options)
