"""How deep the draft worker decodes its branches: as asked, or as verification hides (`--lookahead auto`).

Drafts cost nothing while the target verifies anyway; one that is not done by then makes the target wait. So the best
depth is what fits the verification window, K* = floor((window - glue) / step), all three measured by the worker.
"""

from __future__ import annotations

from typing import Protocol

from ssd_ascend.speculation.recent import Recent


class BranchDepth(Protocol):
    """Asked for a depth before branches are decoded, told afterwards how long things took. Seconds."""

    def depth(self) -> int:
        """Drafts per branch, at least 1."""
        ...

    def saw_window(self, seconds: float) -> None:
        """The target's next request came this long after the answer."""
        ...

    def saw_glue(self, seconds: float) -> None:
        """Glue and the choice of guesses took this long."""
        ...

    def saw_branches(self, steps: int, seconds: float) -> None:
        """`steps` branch steps took this long."""
        ...


class FixedDepth:
    """The configured lookahead, whatever it costs."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead

    def depth(self) -> int:
        """Always the same."""
        return self._lookahead

    def saw_window(self, seconds: float) -> None:
        """Changes nothing."""

    def saw_glue(self, seconds: float) -> None:
        """Changes nothing."""

    def saw_branches(self, steps: int, seconds: float) -> None:
        """Changes nothing."""


class WindowDepth:
    """K* from what was typical of late; `most` until all three times were seen."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._window_s, self._glue_s, self._step_s = Recent(), Recent(), Recent()

    def depth(self) -> int:
        """floor((window - glue) / step), at least 1 and at most `most`."""
        window_s, glue_s, step_s = self._window_s.typical, self._glue_s.typical, self._step_s.typical
        if window_s is None or glue_s is None or step_s is None:
            return self._most
        fitting = (window_s - glue_s) / max(step_s, 1e-9)
        return max(1, min(self._most, int(fitting + 1e-6)))  # a window of exactly k steps holds k of them

    def saw_window(self, seconds: float) -> None:
        """See `BranchDepth`."""
        self._window_s.add(seconds)

    def saw_glue(self, seconds: float) -> None:
        """See `BranchDepth`."""
        self._glue_s.add(seconds)

    def saw_branches(self, steps: int, seconds: float) -> None:
        """See `BranchDepth`."""
        self._step_s.add(seconds / steps)
