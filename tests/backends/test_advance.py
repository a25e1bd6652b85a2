"""The next round's numbers from a verdict: every backend's way against the definition, row by row in Python."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.core.advance import Advance, Places
from ssd_ascend.runtime.advance import advance, advancer

TARGET_BLOCK, DRAFT_BLOCK = 16, 4
NOBODY = (-2, -3)


class Round:
    """`count` sequences judged in a size of `rows`, at random places, some with fewer drafts; and what is right."""

    def __init__(self, rows: int, count: int, lookahead: int, *, features: bool, seed: int) -> None:
        draw = random.Random(seed)
        self.lookahead, self.features, self.rows = lookahead, features, rows
        self.start = [draw.randrange(1, 200) for _ in range(count)]
        self.drafts = [draw.choice([lookahead, lookahead, draw.randrange(lookahead + 1)]) for _ in range(count)]
        self.pairs: list[tuple[int, int]] = []
        self.first: list[int] = []
        for drafts in self.drafts:
            stand = draw.randrange(drafts + 1)
            self.first.append(len(self.pairs))
            tokens = [draw.randrange(50) for _ in range(drafts + 1)]
            fed = [draw.randrange(50), *(t if i < stand else t + 100 for i, t in enumerate(tokens[:drafts]))]
            self.pairs += zip(tokens, fed, strict=True)
        if count:
            self.pairs[-1] = (-1, self.pairs[-1][1])  # no finite logits
        self.tables = [[draw.sample(range(1000), k=20), draw.sample(range(1000), k=70)] for _ in range(rows)]

    def tensors(self, device: torch.device) -> Advance:
        """The tensors, those that are written full of rubbish."""
        rows, k, count = self.rows, self.lookahead, len(self.start)
        width = k + 1 if self.features else 2

        def rubbish(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, -77, dtype=dtype, device=device)

        def tensor(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        def places(tokens: int, which: int, size: int) -> Places:
            return Places(
                rubbish(rows, tokens), rubbish(rows, tokens), rubbish(rows, 1, dtype=torch.int32),
                tensor([tables[which] for tables in self.tables], torch.int32), size,
            )  # fmt: skip

        feed = places(width, 1, DRAFT_BLOCK)
        nobody = len(self.pairs)
        judged = [
            [first + j if j <= drafts else nobody for j in range(k + 1)]
            for first, drafts in zip(self.first, self.drafts, strict=True)
        ]
        steps = [rubbish(k - 1, rows).T, rubbish(k - 1, rows).T, rubbish(k - 1, rows, dtype=torch.int32).T]
        return Advance(
            pairs=tensor([*self.pairs, NOBODY]),
            rows=tensor(judged + [[nobody] * (k + 1)] * (rows - count)),
            start=tensor(self.start + [-1] * (rows - count)),
            ids=rubbish(rows, width), feed=feed, last=rubbish(rows),
            features=rubbish(rows, width) if self.features else None,
            steps=Places(*steps, feed.table, DRAFT_BLOCK),
            verify_ids=rubbish(rows, k + 1), verify=places(k + 1, 0, TARGET_BLOCK),
        )  # fmt: skip

    def check(self, to: Advance) -> None:
        """Row by row."""
        for row in range(self.rows):
            if row < len(self.start):
                self._check_row(to, row)
            else:
                assert all(set(places.slots[row].tolist()) <= {-1} for places in (to.feed, to.steps, to.verify))
                assert all(set(places.kv_lens[row].tolist()) <= {0} for places in (to.feed, to.steps, to.verify))

    def _check_row(self, to: Advance, row: int) -> None:
        k, start = self.lookahead, self.start[row]
        judged = self.pairs[self.first[row] : self.first[row] + self.drafts[row] + 1]
        stood = 0
        while stood < self.drafts[row] and judged[stood][0] == judged[stood + 1][1]:
            stood += 1
        new = [max(0, token) for token, _ in judged[: stood + 1]]
        end, width = start + stood + 1, to.ids.shape[1]
        self._check_places(to.verify, row, end, k + 1)
        assert int(to.verify_ids[row, 0]) == new[-1]
        if self.features:
            assert to.ids[row].tolist() == new + [new[-1]] * (k - stood)
            assert int(to.last[row]) == row * width + stood
            self._check_places(to.feed, row, start, width)
            self._check_places(to.steps, row, end, k - 1)
            assert to.features is not None
            table = to.verify.table[row].tolist()
            slots = [table[p // TARGET_BLOCK] * TARGET_BLOCK + p % TARGET_BLOCK for p in range(start, end)]
            assert to.features[row].tolist() == slots + [slots[-1]] * (k - stood)
        else:
            assert to.ids[row].tolist() == [judged[stood][1], new[-1]]
            assert int(to.last[row]) == row * 2 + 1
            self._check_places(to.feed, row, end - 1, 2)
            self._check_places(to.steps, row, end + 1, k - 1)

    @staticmethod
    def _check_places(places: Places, row: int, first: int, count: int) -> None:
        table, size = places.table[row].tolist(), places.block_size
        where = range(first, first + count)
        assert places.positions[row].tolist() == list(where)
        assert places.slots[row].tolist() == [table[p // size] * size + p % size for p in where]
        keys = [p + 1 for p in where]
        assert places.kv_lens[row].tolist() == keys[len(keys) - places.kv_lens.shape[1] :]


def check_all(way: Callable[[Advance], None], device: torch.device) -> None:
    """Sizes, lookaheads and both kinds of entries."""
    for seed, (rows, count) in enumerate([(1, 1), (2, 1), (8, 8), (12, 9), (4, 0)]):
        for lookahead in (1, 2, 6, 7, 8):
            for features in (False, True):
                one = Round(rows, count, lookahead, features=features, seed=seed)
                to = one.tensors(device)
                way(to)
                one.check(to)


@pytest.mark.parametrize("own", [True, False], ids=["device", "reference"])
def test_the_next_round_s_numbers(backend: Backend, device: torch.device, own: bool) -> None:
    if own and not backend.capabilities.device_lengths:
        pytest.skip(f"{backend.name} takes lengths from the host")
    check_all(advancer(backend) if own else advance, device)
