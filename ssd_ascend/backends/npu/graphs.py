"""Captured graphs of the NPU. Off for now; see `docs/npu.md`."""

from __future__ import annotations


class Recorder:
    """Where attention leaves what a graph's replay must re-issue."""
