"""What rank 0 tells the other ranks of a step: the rows of its batch, in a fixed binary layout.

    header   mode, where tokens come from, number of rows, of tokens, of new blocks
    int32    per row: tokens, first position, logit rows, name of its block table, how many blocks of it stay as they
             were, how many follow anew; then all tokens; then all new blocks

Only rank 0 schedules, speculates and samples; with the same rows every rank builds the same batch. A block table is
told once, and then what becomes of it: `StepWriter` remembers what `StepReader` at the other end has.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Sequence as Rows
from typing import Final, NamedTuple

from ssd_ascend.core.batch import Mode
from ssd_ascend.errors import TransportError
from ssd_ascend.runtime.inputs import Row

_HEADER: Final = struct.Struct("=HHIII")
_PER_ROW: Final = 6
_MODES: Final = tuple(Mode)
_CODES: Final = {mode: code for code, mode in enumerate(_MODES)}
_MOST_TABLES: Final = 1024
"""Tables that have a name at a time; the one that got its name first gives it up."""


class Tokens(enum.IntEnum):
    """Where the tokens of a step are found. BROADCAST: `input_ids` come from rank 0's device. CHOSEN: the numbers are
    rows of the latest output, whose arg-max is meant. PLACED: rank 0's device sends the tokens and their places."""

    GIVEN = 0
    BROADCAST = 1
    CHOSEN = 2
    PLACED = 3


class Step(NamedTuple):
    """One step. Where `tokens` are not given, those of its rows are placeholders."""

    mode: Mode
    rows: list[Row]
    tokens: Tokens


class _Told(NamedTuple):
    """A table, and what is known of it at the other end. Holding the table keeps its identity from another one."""

    name: int
    table: Rows[int]
    blocks: list[int]


class StepWriter:
    """Makes the messages of one line, in the order in which they are sent."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}

    def pack(self, mode: Mode, rows: Rows[Row], tokens: Tokens = Tokens.GIVEN) -> bytes:
        """The message."""
        numbers: list[int] = []
        ids: list[int] = []
        blocks: list[int] = []
        for row in rows:
            name, kept, new = self._tell(row.block_table)
            numbers += (len(row.tokens), row.start, row.num_logits, name, kept, len(new))
            ids += row.tokens
            blocks += new
        head = _HEADER.pack(_CODES[mode], tokens, len(rows), len(ids), len(blocks))
        return b"".join((head, array("i", numbers), array("i", ids), array("i", blocks)))

    def _tell(self, table: Rows[int]) -> tuple[int, int, Rows[int]]:
        """A table's name, the blocks that stay, and those after them. What it holds decides, not who has it."""
        told = self._told.get(id(table))
        if told is None:
            told = self._name(table)
        blocks = told.blocks
        if blocks == table:
            return told.name, len(blocks), ()
        kept = _shared(blocks, table)
        new = table[kept:]
        blocks[kept:] = new
        return told.name, kept, new

    def _name(self, table: Rows[int]) -> _Told:
        name = len(self._told)
        if name == _MOST_TABLES:
            name = self._told.pop(next(iter(self._told))).name
        told = self._told[id(table)] = _Told(name, table, [])
        return told


def _shared(blocks: list[int], table: Rows[int]) -> int:
    """Blocks at the front that are the same; fewer, where looking for the last of them would take long."""
    shared, back = min(len(blocks), len(table)), 1
    while shared > 0 and blocks[:shared] != table[:shared]:
        shared, back = max(0, shared - back), 2 * back
    return shared


class StepReader:
    """Reads the messages of one line, in the order in which they came."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def unpack(self, message: bytes) -> Step:
        """The step; TransportError when the message does not hold what its header says."""
        if len(message) < _HEADER.size:
            raise TransportError(f"a step of {len(message)} bytes from rank 0")
        code, tokens, num_rows, num_tokens, num_blocks = _HEADER.unpack_from(message)
        values = array("i")
        size = _HEADER.size + values.itemsize * (_PER_ROW * num_rows + num_tokens + num_blocks)
        if code >= len(_MODES) or tokens >= len(Tokens) or len(message) != size:
            raise TransportError(f"a step of mode {code} and {num_rows} rows in {len(message)} bytes from rank 0")
        values.frombytes(message[_HEADER.size :])
        token = _PER_ROW * num_rows
        block = token + num_tokens
        rows: list[Row] = []
        for at in range(0, token, _PER_ROW):
            length, start, num_logits, name, kept, new = values[at : at + _PER_ROW]
            table = self._table(name, kept, values[block : block + new])
            rows.append(Row(values[token : token + length], start, table, num_logits))
            token, block = token + length, block + new
        return Step(_MODES[code], rows, Tokens(tokens))

    def _table(self, name: int, kept: int, new: array[int]) -> list[int]:
        table = self._tables.get(name, [])
        if kept > len(table):
            raise TransportError(f"a step from rank 0 keeps {kept} of {len(table)} blocks of table {name}")
        if kept == 0:  # another table: rows of this message may still hold the one that had its name
            table = self._tables[name] = new.tolist()
        elif new or kept < len(table):
            table[kept:] = new
        return table
