"""`none`: plain decoding, the loop with lookahead 0."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from ssd_ascend.core.batch import Awaited
from ssd_ascend.core.plan import DecodeRow
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Speculation, Verification
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.speculation.base import Speculator
from ssd_ascend.speculation.setup import TargetSide


def build(side: TargetSide) -> Speculator:
    """Takes nothing of what it is given."""
    return NoSpeculator()


class NoSpeculator:
    """Declines every row."""

    lookahead = 0
    wants_features = False

    def __init__(self) -> None:
        self.stats = SpeculationStats()

    def propose(self, rows: Rows[DecodeRow]) -> Speculation:
        """Nothing, for every row."""
        return Speculation.declined(len(rows))

    def prepare(self, sequences: Rows[Sequence]) -> None:
        """Nothing to prepare."""

    def observe(self, sequences: Rows[Sequence], verification: Verification, *, read_prompts: bool) -> None:
        """Nothing to learn."""

    def meanwhile(self, verdict: Awaited | None) -> None:
        """Nothing is left for later."""

    def release(self, seq_ids: Rows[int]) -> None:
        """Nothing is held."""

    def tune(self, lookahead: int, fan_out: Rows[int]) -> None:
        """Nothing is prepared."""

    def health(self) -> str | None:
        """Always well."""
        return None

    def close(self) -> None:
        """Nothing was started."""
