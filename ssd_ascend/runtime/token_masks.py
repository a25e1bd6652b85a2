"""Which tokens a grammar lets follow, for every row of a step: the matchers of running sequences, and the mask itself.

Verifier and drafters each hold one `TokenMasks`; `runtime/sampler.py` applies it as one more stage of the law. Nothing
is undone when a draft falls: a matcher only ever keeps committed tokens, and steps over drafts and back within a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ssd_ascend.errors import RequestError
from ssd_ascend.runtime.pack import to_device
from ssd_ascend.runtime.row_context import RowContext
from ssd_ascend.structured.compiler import GrammarCompiler

if TYPE_CHECKING:
    import llguidance

_DRAFTS_WAIT_S = 0.02

Bits = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Entry:
    """One sequence: a matcher that has read `num_read` of its tokens, the prompt among them."""

    matcher: llguidance.LLMatcher
    num_read: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows start, start + 1, ... of one sequence, each one draft further: `base` before the first, then `drafts`."""

    start: int
    context: RowContext
    base: list[int]
    drafts: list[int]


class TokenMasks:
    """The matchers of sequences with a grammar, grown as their tokens grow. `keeps_alive` is for drafters: a row whose
    vocabulary has no fitting token stays as it was (its draft will fall) instead of losing its law."""

    def __init__(self, compiler: GrammarCompiler, *, keeps_alive: bool = False) -> None:
        self._compiler = compiler
        self._keeps_alive = keeps_alive
        self._entries: dict[int, _Entry] = {}
        self._faults: dict[int, str] = {}
        self._executor: llguidance.LLExecutor | None = None
        self._tables: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._entries)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences; unknown ids are fine."""
        for seq_id in seq_ids:
            self._entries.pop(seq_id, None)
            self._faults.pop(seq_id, None)

    def fault(self, seq_id: int) -> str | None:
        """Why the grammar of a sequence cannot be followed any further, if it cannot."""
        return self._faults.get(seq_id)

    def apply(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
        """Take all that may not follow out of logits [n, V], in place; every row of `rows` [n] has a grammar."""
        bits = to_device(torch.from_numpy(self.allowed(rows).view(np.uint8)), logits.device)
        table = self._table(logits.device)
        barred = table.index_select(0, bits.flatten().to(torch.int32)).view(len(rows), -1)[:, : logits.shape[1]]
        if self._keeps_alive:
            is_dead = (logits + barred).amax(-1, keepdim=True) == float("-inf")
            barred = torch.where(is_dead, torch.zeros_like(barred), barred)
        logits.add_(barred)

    def _table(self, device: torch.device) -> torch.Tensor:
        """[256, 8]: what each byte of a mask adds to eight logits. A look-up, as not every device can shift bits."""
        table = self._tables.get(device)
        if table is None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            adds = np.where(bits == 1, np.float32(0), np.float32("-inf"))
            table = self._tables[device] = torch.from_numpy(adds).to(device)
        return table

    def allowed(self, rows: Sequence[RowContext]) -> Bits:
        """One bit per token [n, ceil(V / 32)], set where it may follow. A row behind a draft that does not fit has all
        bits set: whatever it says, it will not be asked."""
        bits = np.full((len(rows), (self._compiler.vocab_size + 31) // 32), -1, dtype=np.int32)
        together: dict[int, _Run] = {}
        for run in _runs(rows):
            seq_id = run.context.seq_id
            if self._keeps_alive and not self._is_known(run.context):
                continue
            if run.base or seq_id in together:
                self._fill_alone(run, bits)
            else:
                together[seq_id] = run
        self._fill(list(together.values()), bits)
        return bits

    def _is_known(self, row: RowContext) -> bool:
        """Whether the grammar of a row is compiled. Drafts are not worth a wait: without a mask they may fall."""
        if row.seq_id in self._entries:
            return True
        assert row.params.grammar is not None
        try:
            return self._compiler.is_ready(row.params.grammar, patience_s=_DRAFTS_WAIT_S)
        except RequestError:  # the verifier's to tell
            return False

    def _fill_alone(self, run: _Run, bits: Bits) -> None:
        """One run that begins behind drafts of its own."""
        matcher = self._read(run.context).matcher
        taken = matcher.try_consume_tokens(run.base)
        if taken == len(run.base):
            self._fill([run], bits)
        if taken:
            matcher.rollback(taken)

    def _fill(self, runs: Sequence[_Run], bits: Bits) -> None:
        """The masks of several sequences at once, on all cores that llguidance may use."""
        if not runs:
            return
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor()
        where = (bits.ctypes.data, bits.shape[1] * bits.itemsize, bits.shape[0])
        jobs = [(self._read(run.context).matcher, run.start, run.drafts) for run in runs]
        if single := [(matcher, start) for matcher, start, drafts in jobs if not drafts]:
            self._executor.unsafe_compute_mask_ptr(single, *where)
        if drafted := [job for job in jobs if job[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for run, (matcher, start, drafts) in zip(runs, jobs, strict=True):
            if matcher.is_error():
                reason = matcher.get_error().strip().splitlines() or ["it is too complex"]
                self._faults[run.context.seq_id] = f"the grammar cannot be followed: {reason[0]}"
                bits[start : start + len(drafts) + 1] = 0

    def _read(self, row: RowContext) -> _Entry:
        """The entry of a row's sequence, caught up with its committed tokens."""
        entry = self._entries.get(row.seq_id)
        if entry is None or entry.num_read > len(row.token_ids):  # an id that starts over is a new sequence
            assert row.params.grammar is not None
            matcher = self._compiler.matcher(row.params.grammar)
            entry = self._entries[row.seq_id] = _Entry(matcher, row.num_prompt_tokens)
        if entry.num_read < len(row.token_ids):
            entry.matcher.consume_tokens(list(row.token_ids[entry.num_read :]))
            entry.num_read = len(row.token_ids)
        return entry


def _runs(rows: Sequence[RowContext]) -> Iterator[_Run]:
    """`rows` cut where the next one is not its predecessor and one draft more."""
    start = 0
    for index in range(1, len(rows) + 1):
        if index < len(rows) and _follows(rows[index - 1], rows[index]):
            continue
        first, last = rows[start], rows[index - 1]
        base = len(first.drafts)
        yield _Run(start, first, list(first.drafts), list(last.drafts[base:]))
        start = index


def _follows(row: RowContext, other: RowContext) -> bool:
    return (
        row.seq_id == other.seq_id
        and len(other.drafts) == len(row.drafts) + 1
        and list(other.drafts[: len(row.drafts)]) == list(row.drafts)
    )
