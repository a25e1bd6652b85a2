"""The hypothetical tokens each row of a drafting stands behind. `drafters/paged.py` keeps one per drafting.

The law needs them where it depends on the past: on the device for penalties, on the host for grammars. Rows with
neither cost nothing; a drafting in which some row has a grammar copies each step's tokens to the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from ssd_ascend.speculation.base import DraftSequence


class Tails:
    """Tokens beyond the committed ones, row by row. `starts`: those a row stands behind at first, on the host; a first
    `grow` follows before anyone asks."""

    def __init__(self, seqs: Rows[DraftSequence], starts: Rows[Rows[int]] | None = None) -> None:
        given = [()] * len(seqs) if starts is None else starts
        self._penalized = [seq.sampling.has_penalties for seq in seqs]
        self._constrained = [seq.sampling.grammar is not None for seq in seqs]
        self._starts = given
        self._host = [list(start) if wanted else [] for start, wanted in zip(given, self._constrained, strict=True)]
        self._grown: list[torch.Tensor] = []

    def grow(self, tokens: torch.Tensor) -> None:
        """One more token for every row, int64 [R]."""
        self._grown.append(tokens)
        if any(self._constrained):
            for row, token in enumerate(tokens.tolist()):
                if self._constrained[row]:
                    self._host[row].append(token)

    def on_host(self, row: int) -> list[int]:
        """The tokens of a row with a grammar; nothing for others. Good until the next `grow`."""
        return self._host[row]

    def on_device(self, row: int) -> torch.Tensor | None:
        """The tokens of a row with penalties, int64 [n]; None for others, and when there are none."""
        if not self._penalized[row] or not self._grown:
            return None
        start = torch.tensor(list(self._starts[row]), dtype=torch.int64, device=self._grown[0].device)
        return torch.cat([start, *(tokens[row : row + 1] for tokens in self._grown)])
