"""What rank 0 tells the other ranks of a step: the rows of its batch, in a fixed binary layout.

    header   mode, whether drafts follow on the device, number of rows, of tokens, of blocks
    int32    per row: tokens, first position, logit rows, blocks; then all tokens; then all block tables

Only rank 0 schedules, speculates and samples; with the same rows every rank builds the same batch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Rows
from typing import Final, NamedTuple

from ssd_ascend.core.batch import Mode
from ssd_ascend.errors import TransportError
from ssd_ascend.runtime.inputs import Row

_HEADER: Final = struct.Struct("=HHIII")
_MODES: Final = tuple(Mode)
_CODES: Final = {mode: code for code, mode in enumerate(_MODES)}


class Step(NamedTuple):
    """`drafts_follow`: the tokens of drafts are placeholders, the real ones come as a broadcast of `input_ids`."""

    mode: Mode
    rows: list[Row]
    drafts_follow: bool


def pack_step(mode: Mode, rows: Rows[Row], *, drafts_follow: bool) -> bytes:
    """The message."""
    numbers: list[int] = []
    for row in rows:
        numbers += (len(row.tokens), row.start, row.num_logits, len(row.block_table))
    tokens = [array("i", row.tokens) for row in rows]  # made of a list at once: twice as fast as extending an array
    tables = [array("i", row.block_table) for row in rows]
    num_tokens, num_blocks = sum(numbers[::4]), sum(numbers[3::4])
    head = _HEADER.pack(_CODES[mode], drafts_follow, len(rows), num_tokens, num_blocks)
    return b"".join((head, array("i", numbers), *tokens, *tables))


def unpack_step(message: bytes) -> Step:
    """The inverse; TransportError when the message does not hold what its header says."""
    if len(message) < _HEADER.size:
        raise TransportError(f"a step of {len(message)} bytes from rank 0")
    code, drafts_follow, num_rows, num_tokens, num_blocks = _HEADER.unpack_from(message)
    values = array("i")
    if code >= len(_MODES) or len(message) != _HEADER.size + values.itemsize * (4 * num_rows + num_tokens + num_blocks):
        raise TransportError(f"a step of mode {code} and {num_rows} rows in {len(message)} bytes from rank 0")
    values.frombytes(message[_HEADER.size :])
    token, block = 4 * num_rows, 4 * num_rows + num_tokens
    rows: list[Row] = []
    for at in range(0, 4 * num_rows, 4):
        length, start, num_logits, blocks = values[at : at + 4]
        rows.append(Row(values[token : token + length], start, values[block : block + blocks].tolist(), num_logits))
        token, block = token + length, block + blocks
    return Step(_MODES[code], rows, bool(drafts_follow))
