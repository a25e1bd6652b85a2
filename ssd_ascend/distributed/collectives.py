"""Implementations of `backends.base.Collectives`. The builder makes one per rank and hands it to `BuildContext`.

Which library carries them is the backend's own word (`Backend.collective`); here it is only passed on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
from torch import distributed

from ssd_ascend.backends.base import SmallSums
from ssd_ascend.errors import ConfigError, WorkerError, first_line
from ssd_ascend.log import get_logger

TIMEOUT_S: Final = 600.0
"""Of one collective. The last resort only: a rank that dies or stops is noticed by `control.py`, in seconds."""

_CLOSE_S: Final = 15.0
log = get_logger(__name__)


class SingleRank:
    """A model that lives on one rank: every collective is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """`x` itself, whatever `dim`."""
        return x

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """`x` itself; the only rank there is must be `src`."""
        assert src == 0, f"rank {src} does not exist in a group of one"
        return x

    def barrier(self) -> None:
        """Nobody to wait for."""


class GroupCollectives:
    """Ranks that are processes, through torch.distributed. Everything is ordered by the current stream of the device,
    and may be captured into a graph where the device's library allows that."""

    _wakers: ClassVar[list[Callable[[], None]]] = []
    """What else wakes those who wait for a rank, beside the end of the group."""
    _ending: ClassVar[threading.Lock] = threading.Lock()
    """Whoever notices a loss, and whoever closes, may both end the group."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._small: SmallSums | None = None
        self._meet: Callable[[], None] | None = None
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        # renamed in torch 2.13; the old name warns there
        self._gather: Any = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in place where `x` is contiguous."""
        x = x.contiguous()
        if self._small is not None and self._small.fits(x):
            return self._small.all_reduce(x)
        distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Rank after rank along `dim`."""
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._gather(gathered, x.contiguous(), group=self._group)
        if dim % x.dim() == 0:
            return gathered
        parts = gathered.view(self.size, *x.shape)
        return torch.cat(parts.unbind(0), dim=dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """In place; `x` is contiguous."""
        distributed.broadcast(x, src, group=self._group)
        return x

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._meet is None:
            distributed.barrier(group=self._group)
        else:
            self._meet()

    def meet_by(self, meet: Callable[[], None]) -> None:
        """Have `barrier` done by this from now on: by a line that shows at once who is lost, where the library would
        wait for a rank that does not come, and cannot be woken if it meets there for the first time."""
        self._meet = meet

    def use(self, sums: SmallSums | None) -> None:
        """Have small sums done this way from now on."""
        self._small = sums
        if sums is not None:
            self.wake_by(sums.abort)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have this called, too, when a rank is lost: from another thread, and once more when the group is closed, for
        what was begun meanwhile. RuntimeError where it cannot be done."""
        self._wakers.append(wake)

    @classmethod
    def abort(cls) -> None:
        """Wake whoever waits for a rank that will never come; nothing works afterwards."""
        with cls._ending:
            for wake in cls._wakers:
                try:
                    wake()
                except RuntimeError as error:  # of a device that is lost, too: the group must end all the same
                    log.warning("who waits for a lost rank could not be told: %s", first_line(error))
            group = distributed.group.WORLD
            if group is not None:
                distributed.distributed_c10d._abort_process_group(group)

    def close(self, *, lost: bool = False) -> None:
        """Give the group back; every rank calls it, or is gone. Graphs that hold collectives must be gone before.
        lost: a rank is gone, so the group is aborted, if it is not yet: it can no longer be taken apart together."""
        self._small = None
        if distributed.is_initialized():
            closing = threading.Thread(target=self.abort if lost else distributed.destroy_process_group, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)
            if closing.is_alive():  # nothing depends on it any more
                log.warning("the group of ranks did not close within %g s", _CLOSE_S)
        self._wakers.clear()


def join_group(
    library: str, store: distributed.Store, rank: int, size: int, device: torch.device, *, timeout_s: float = TIMEOUT_S
) -> GroupCollectives:
    """Meet the other ranks at `store`. ConfigError when this process has a group already or the library is missing,
    WorkerError when the others do not come."""
    if distributed.is_initialized():
        raise ConfigError(
            "this process already has a torch.distributed group", remedy="close it first, or serve from another process"
        )
    # ranks meet under the number of their group, and an attempt that failed leaves its own behind
    distributed.distributed_c10d._world.group_count = 0
    try:
        distributed.init_process_group(
            library,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=None if device.type == "cpu" else device,
        )
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"rank {rank} of {size} found no {library} group within {timeout_s:g} s: {first_line(error)}"
        ) from error
    group = distributed.group.WORLD
    assert group is not None
    return GroupCollectives(group)
