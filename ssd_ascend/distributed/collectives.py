"""Implementations of `backends.base.Collectives`. The builder makes one per rank and hands it to `BuildContext`."""

from __future__ import annotations

import torch


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
