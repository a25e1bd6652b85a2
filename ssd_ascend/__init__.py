"""ssd_ascend: speculative speculative decoding with EAGLE-3 heads on NVIDIA GPUs, Ascend NPUs and CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssd_ascend import env  # noqa: F401 -- before anyone imports torch: see TORCH_DEVICE_BACKEND_AUTOLOAD there

if TYPE_CHECKING:
    from ssd_ascend.core.sampling import SamplingParams
    from ssd_ascend.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Load the two public names when they are asked for: importing a room of the house must not import torch."""
    if name == "LLM":
        from ssd_ascend.llm import LLM

        return LLM
    if name == "SamplingParams":
        from ssd_ascend.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
