"""Which name means which drafter or speculator. Adding one: its file, and its line here. Torch-free, for `flags.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssd_ascend.registry import Registry

if TYPE_CHECKING:
    from ssd_ascend.speculation.setup import DrafterKind, SpeculatorKind

DRAFTERS: Registry[DrafterKind] = Registry(
    "drafter",
    {
        "model": "ssd_ascend.speculation.drafters.model:KIND",
        "eagle3": "ssd_ascend.speculation.drafters.eagle3:KIND",
        "ngram": "ssd_ascend.speculation.drafters.ngram:KIND",
    },
)

SPECULATORS: Registry[SpeculatorKind] = Registry(
    "speculator",
    {
        "none": "ssd_ascend.speculation.speculators.none:build",
        "sd": "ssd_ascend.speculation.speculators.sd:build",
        "ssd": "ssd_ascend.speculation.speculators.ssd:build",
    },
)
