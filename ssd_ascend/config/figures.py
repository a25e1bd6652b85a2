"""A number with its pedigree: where it was read and how far to trust it. Topologies and presets are made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ssd_ascend.errors import ConfigError

Confidence = Literal["vendor", "paper", "measured", "simulated", "derived", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number; its unit is in the name of its key. `source` is a key of the file's [sources], or says it outright.

    confidence: "vendor" and "paper" are published, "simulated" is a vendor's planning model, "measured" was timed,
    "derived" is arithmetic on such, "estimate" is a guess that planning cannot do without.
    """

    value: float
    source: str
    confidence: Confidence
    note: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0.0):
            raise ConfigError(f"value is {self.value}", remedy="give a positive number; leave out what is not known")
        if not self.source.strip():
            raise ConfigError("a number without a source", remedy="say where it comes from")
