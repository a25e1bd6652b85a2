"""Threads of the host's own operators, for processes whose model lives on a device. Called once it is loaded."""

from __future__ import annotations

import torch

from ssd_ascend.backends.base import Capabilities


def settle_threads(capabilities: Capabilities, wanted: int | None) -> None:
    """One thread where the device does the work and nobody asked for more.

    A step then touches some hundred kilobytes on the host at most, which one thread moves in microseconds; waking a
    team of threads for them takes milliseconds where many cores are shared with other processes.
    """
    if wanted is None and not capabilities.host_memory:
        torch.set_num_threads(1)
