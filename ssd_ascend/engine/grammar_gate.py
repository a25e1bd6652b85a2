"""Requests whose grammar is still being compiled, or has no room yet: they wait here, and the step loop goes on.

`engine.py` holds one gate. Whoever is let through holds its grammar until its sequence ends, so that no step, and no
preemption, ever compiles. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.sequence import FinishReason
from ssd_ascend.errors import RequestError
from ssd_ascend.structured.compiler import GrammarCompiler

_PATIENCE_S = 0.02
"""Nearly every grammar is compiled within that; a step for the others may be so late."""


@dataclass(slots=True)
class _Waiting:
    """`cost_s` is known once its grammar was compiled, which may have been dropped since."""

    request: EngineRequest
    grammar: Grammar
    cost_s: float | None = None


class GrammarGate:
    """In order of arrival, but whose grammar is ready need not wait for others."""

    def __init__(self, grammars: GrammarCompiler | None) -> None:
        self._grammars = grammars
        self._waiting: dict[int, _Waiting] = {}
        self._holders: dict[int, Grammar] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def lets_in(self, request: EngineRequest) -> bool:
        """Whether a request may begin now; else it waits here. Raises RequestError for a grammar that cannot be."""
        grammar = request.sampling.grammar
        if grammar is None:
            return True
        if self._grammars is None:
            raise RequestError("this engine cannot constrain answers", param="grammar")
        waiting = _Waiting(request, grammar)
        if self._may_begin(self._grammars, waiting, _PATIENCE_S):
            return True
        self._waiting[request.id] = waiting
        return False

    def take(self, *, is_idle: bool) -> tuple[list[EngineRequest], list[TokenDelta]]:
        """Who may begin by now, and the last words of those who never can. is_idle: nobody minds a short wait."""
        begin, refused = [], []
        patience_s = _PATIENCE_S if is_idle else 0.0
        for seq_id, waiting in list(self._waiting.items()):
            assert self._grammars is not None
            try:
                if not self._may_begin(self._grammars, waiting, patience_s):
                    patience_s = 0.0
                    continue
                begin.append(waiting.request)
            except RequestError as error:
                refused.append(_last_words(seq_id, FinishReason.ERROR, str(error)))
            del self._waiting[seq_id]
        return begin, refused

    def _may_begin(self, grammars: GrammarCompiler, waiting: _Waiting, patience_s: float) -> bool:
        grammar = waiting.grammar
        if waiting.cost_s is not None and not grammars.has_room(grammar, waiting.cost_s):
            return False  # and compiling it again would be for nothing
        if not grammars.is_ready(grammar, patience_s=patience_s):
            return False
        waiting.cost_s = grammars.cost_s(grammar)
        if not grammars.has_room(grammar, waiting.cost_s):
            return False
        grammars.hold(grammar)
        self._holders[waiting.request.id] = grammar
        return True

    def abort(self, seq_ids: Iterable[int]) -> list[TokenDelta]:
        """End requests that wait; others are skipped."""
        gone = [seq_id for seq_id in seq_ids if self._waiting.pop(seq_id, None) is not None]
        return [_last_words(seq_id, FinishReason.ABORT) for seq_id in gone]

    def ended(self, seq_ids: Iterable[int]) -> None:
        """Sequences that hold nothing any more; ids without a grammar are fine."""
        for seq_id in seq_ids:
            grammar = self._holders.pop(seq_id, None)
            if grammar is not None:
                assert self._grammars is not None
                self._grammars.let_go(grammar)


def _last_words(seq_id: int, reason: FinishReason, error: str | None = None) -> TokenDelta:
    is_refusal = reason is FinishReason.ERROR
    return TokenDelta(seq_id=seq_id, token_ids=[], finish_reason=reason.value, error=error, refused=is_refusal)
