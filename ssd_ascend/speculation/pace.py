"""Whether a draft worker keeps up with its target, by how long it waits between rounds. Told by `draft_worker.py`."""

from __future__ import annotations

from typing import Final

from ssd_ascend.speculation.recent import Recent

_NO_WAIT: Final = 0.05
_LONG_WAIT: Final = 0.4
"""Of a round's own time. Far apart, so that what haste gains does not end it."""


class Pace:
    """Hurries from when rounds follow without a pause until pauses are long."""

    def __init__(self) -> None:
        self._waited, self._worked = Recent(), Recent()
        self.hurries = False

    def saw_round(self, waited_s: float, worked_s: float) -> None:
        """A request came after `waited_s`, and its round took `worked_s`."""
        self._waited.add(waited_s)
        self._worked.add(worked_s)
        waited, worked = self._waited.typical, self._worked.typical
        assert waited is not None
        assert worked is not None
        if waited < _NO_WAIT * worked:
            self.hurries = True
        elif waited > _LONG_WAIT * worked:
            self.hurries = False
