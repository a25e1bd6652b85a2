"""The line's memory of block tables: whatever becomes of them, the other end has the very rows, and little is sent."""

from __future__ import annotations

import random

import pytest

from ssd_ascend.core.batch import Mode
from ssd_ascend.engine import step_message
from ssd_ascend.engine.step_message import StepReader, StepWriter, Tokens
from ssd_ascend.errors import TransportError
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.inputs import Row


class Line:
    """Both ends, and what went over."""

    def __init__(self) -> None:
        self.writer, self.reader = StepWriter(), StepReader()

    def check(self, rows: list[Row], mode: Mode = Mode.VERIFY, tokens: Tokens = Tokens.GIVEN) -> int:
        """Tell the rows, compare; the bytes it took."""
        message = self.writer.pack(mode, rows, tokens)
        step = self.reader.unpack(message)
        assert (step.mode, step.tokens) == (mode, tokens)
        assert [Row(list(r.tokens), r.start, list(r.block_table), r.num_logits) for r in step.rows] == rows
        return len(message)


def test_a_step_survives_its_message() -> None:
    rows = [Row([7, 8, 9], 4, [3, 1], 3), Row([5], 0, [2], 0), Row([6], 31, [9, 8], 1)]
    line = Line()
    for tokens in Tokens:
        line.check(rows, Mode.PREFILL, tokens)


@pytest.mark.parametrize("spoil", [lambda m: m[:-1], lambda m: m[:7], lambda m: b"\xff\xff" + m[2:]])
def test_a_message_that_is_none_is_refused(spoil) -> None:  # type: ignore[no-untyped-def]
    message = StepWriter().pack(Mode.DECODE, [Row([6], 31, [9, 8], 1)])
    with pytest.raises(TransportError):
        StepReader().unpack(spoil(message))


def test_a_reader_that_missed_a_message_says_so() -> None:
    writer, table = StepWriter(), [4, 5, 6]
    writer.pack(Mode.DECODE, [Row([6], 31, table, 1)])
    table.append(7)
    later = writer.pack(Mode.DECODE, [Row([6], 48, table, 1)])
    with pytest.raises(TransportError, match="keeps 3 of 0 blocks"):
        StepReader().unpack(later)


def test_only_what_is_new_is_told() -> None:
    """Tables that stay, grow and lose their ends take a few bytes, however long they are, whoever stands where."""
    tables = [list(range(i, i + 128)) for i in range(16)]
    line = Line()

    def told(order: list[int]) -> int:
        return line.check([Row([1], 2000, tables[i], 1) for i in order])

    whole, everyone = told(list(range(16))), list(range(16))
    least = told(everyone)
    assert whole > 16 * 128 * 4 > 10 * least
    assert told(everyone[3:] + everyone[:2]) < least
    for table in tables:
        table.append(500)
    assert told(everyone) == least + 16 * 4
    for table in tables:
        table[-2:] = [600, 601, 602]
    assert told(everyone) <= least + 16 * 4 * 4  # the end is looked for in steps
    for table in tables:
        del table[-3:]
    assert told(everyone) == least


def test_a_table_that_takes_the_place_of_another_is_told() -> None:
    """Python gives the identity of a list that is gone to the next one: it must not pass for it."""
    line = Line()
    for i in range(200):
        line.check([Row([1], 0, [i, i + 1, i + 2], 1)])


def test_more_tables_than_there_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within one message: a name that changes hands leaves the rows before it as they were."""
    monkeypatch.setattr(step_message, "_MOST_TABLES", 3)
    tables = [[i, i + 1] for i in range(7)]
    line = Line()
    for _ in range(3):
        line.check([Row([1], 0, table, 1) for table in tables])
    line.check([Row([1], 0, tables[i], 1) for i in (5, 0, 6, 5, 2)])
    assert max(line.reader._tables) == 2


@pytest.mark.parametrize("seed", range(6))
def test_whatever_becomes_of_tables(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Sequences that come, grow, are cut, give way and come back, over blocks that change owners all the time."""
    monkeypatch.setattr(step_message, "_MOST_TABLES", 5)
    draw, line = random.Random(seed), Line()
    blocks = BlockManager(40, 4, prefix_cache=True)
    live: dict[int, tuple[list[int], list[int]]] = {}
    ended: list[list[int]] = []
    for step in range(400):
        what = draw.random()
        if what < 0.25 and len(live) < 8:
            ids = [draw.randrange(2) for _ in range(draw.randrange(1, 30))]
            cached = blocks.match(ids)
            if blocks.can_allocate(len(ids), cached):
                live[step] = (ids, blocks.allocate(len(ids), cached))
                blocks.register(live[step][1], ids, len(ids))
        elif what < 0.4 and live:
            ids, table = live.pop(draw.choice(list(live)))
            blocks.free(table)
            ended.append(table)
        for ids, table in live.values():
            if draw.random() < 0.5 and blocks.can_grow(table, len(ids) + 6):
                blocks.grow(table, len(ids) + 6)
            elif draw.random() < 0.5:
                blocks.trim(table, len(ids))
        rows = [Row([1, 2], 0, table, 1) for _, table in live.values() if draw.random() < 0.8]
        if rows:
            line.check(rows)
    assert ended
