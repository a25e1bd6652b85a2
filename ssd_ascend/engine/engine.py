"""The step loop: schedule, speculate, run, verify, commit. One loop for plain decoding, SD and SSD.

Deals in tokens; text belongs to `engine/outputs.py`. Used in process by `llm.py`, and over a socket by the server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from ssd_ascend import trace
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Speculation, Verification
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.admission import admit
from ssd_ascend.engine.executor import Executor
from ssd_ascend.engine.grammar_gate import GrammarGate
from ssd_ascend.engine.identity import EngineInfo, EngineLimits
from ssd_ascend.engine.practice import Practice
from ssd_ascend.engine.scheduler import Scheduler
from ssd_ascend.errors import RequestError
from ssd_ascend.speculation.base import Speculator
from ssd_ascend.speculation.verifier import Verifier
from ssd_ascend.structured.compiler import GrammarCompiler


class Engine:
    """One target with its speculator. Not thread-safe: whoever owns it calls `submit`, `abort` and `step` in turn."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        verifier: Verifier,
        speculator: Speculator,
        info: EngineInfo,
        limits: EngineLimits,
        eos_ids: frozenset[int],
        grammars: GrammarCompiler | None = None,
        practice: Practice | None = None,
    ) -> None:
        self.info = info
        self.limits = limits
        self.eos_ids = eos_ids
        self.grammars = grammars
        self._scheduler = scheduler
        self._executor = executor
        self._verifier = verifier
        self._speculator = speculator
        self._practice = practice
        self._speculates = True
        self._gate = GrammarGate(grammars)
        self._ended: list[TokenDelta] = []
        """Last words of sequences that ended outside a step, handed out by the next one."""

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while some sequence is unfinished, or its end was not told yet."""
        return self._scheduler.has_work or bool(self._ended) or len(self._gate) > 0

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` naming the field that cannot be served."""
        request = replace(request, sampling=admit(request.prompt_token_ids, request.sampling, self.limits))
        if self._gate.lets_in(request):
            self._add(request)

    def _add(self, request: EngineRequest) -> None:
        try:
            self._scheduler.add(self._new_sequence(request))
        except RequestError:
            self._gate.ended([request.id])
            raise

    def _add_late(self) -> list[TokenDelta]:
        """Let in who waited for its grammar; the last words of those who can never be served."""
        if not len(self._gate):
            return []
        begin, refused = self._gate.take(is_idle=not self._scheduler.has_work)
        for request in begin:
            try:
                self._add(request)
            except RequestError as error:
                refused.append(
                    TokenDelta(seq_id=request.id, token_ids=[], finish_reason="error", error=str(error), refused=True)
                )
        return refused

    def _new_sequence(self, request: EngineRequest) -> Sequence:
        params = request.sampling
        num_prompt = len(request.prompt_token_ids)
        assert params.max_tokens is not None, "admission fills it in"
        return Sequence(
            id=request.id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=num_prompt,
            sampling=params,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids),
            max_total_tokens=num_prompt + params.max_tokens,
            seed=_seed_of(params),
            arrival_s=time.monotonic(),
        )

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences now; their last delta says "abort". Ids that are not running are skipped."""
        gone = list(seq_ids)
        self._ended += self._gate.abort(gone)
        self._end(self._scheduler.abort(gone))

    def _end(self, deltas: list[TokenDelta]) -> None:
        """Sequences that ended without a step: free what speculation and verification hold of them."""
        self._ended += deltas
        self._let_go([delta.seq_id for delta in deltas])

    def _let_go(self, seq_ids: list[int]) -> None:
        """Sequences that have ended."""
        self._gate.ended(seq_ids)
        self._forget(seq_ids)

    def _forget(self, seq_ids: list[int]) -> None:
        if seq_ids:
            self._verifier.release(seq_ids)
            self._speculator.release(seq_ids)

    # -- the loop ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenDelta]:
        """One step for every sequence that is scheduled; returns what each gained. Nothing to do: returns at once."""
        ended, self._ended = self._ended, []
        ended += self._add_late()
        if not self._scheduler.has_work:
            return ended
        with trace.span("step"), self._executor.explaining():
            return ended + self._step()

    def _step(self) -> list[TokenDelta]:
        with trace.span("schedule"):
            plan = self._scheduler.schedule()
            self._forget(plan.preempted)
        with trace.span("propose"):
            speculation = self._propose(plan)
        output = self._executor.forward(plan, speculation)
        sampled = plan.sampled
        with trace.span("meanwhile"):
            self._speculator.meanwhile(output.verdict)
            if self._practice is not None and not plan.prefills:
                self._practice.until_there(sampled, speculation, output)
        with trace.span("verify"):
            verification = self._verifier.verify(sampled, speculation, output.logits, output.greedy, output.verdict)
            self._executor.check()
        with trace.span("observe"):
            if self._speculates:
                self._speculator.observe(sampled, verification, read_prompts=bool(plan.prefills))
        with trace.span("commit"):
            failed = self._fail(verification)
            deltas = self._scheduler.commit(plan, verification, speculation)
            self._let_go([delta.seq_id for delta in deltas if delta.finish_reason is not None])
        return failed + deltas

    def _propose(self, plan: StepPlan) -> Speculation:
        if not self._speculates:
            return Speculation.declined(len(plan.decoding))
        if plan.prefills and not plan.decoding:
            self._speculator.prepare([chunk.seq for chunk in plan.prefills])
        return self._speculator.propose(plan.decoding)

    def _fail(self, verification: Verification) -> list[TokenDelta]:
        """End the sequences whose logits were no numbers; the others go on."""
        failed = [self._scheduler.fail(seq_id, reason) for seq_id, reason in verification.faults.items()]
        deltas = [replace(delta, refused=delta.seq_id in verification.refused) for delta in failed if delta is not None]
        self._let_go([delta.seq_id for delta in deltas])
        return deltas

    # -- the rest ----------------------------------------------------------------------------------------------------

    def tune(self, lookahead: int, fan_out: Rows[int] = ()) -> None:
        """Draft at most so many tokens from the next step on, up to what was configured; 0 switches speculation off.
        fan_out: guesses per accepted length, no more of them than was configured; empty leaves them as they are.

        Switched off, the speculator forgets every sequence, and learns of those that still run when it is on again.
        """
        self._scheduler.lookahead = max(0, min(lookahead, self._speculator.lookahead))
        self._speculates = self._scheduler.lookahead > 0 or self._speculator.lookahead == 0
        self._speculator.tune(self._scheduler.lookahead, fan_out)
        if not self._speculates:
            self._speculator.release(self._scheduler.live_ids)

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        stats = self._scheduler.stats()
        return replace(stats, waiting=stats.waiting + len(self._gate))

    def check(self) -> None:
        """Raises WorkerError when the target has lost a rank, which may be while nobody asks for anything."""
        self._executor.check()

    def health(self) -> str | None:
        """None when all is well, else one sentence saying what is degraded."""
        return self._executor.health() or self._speculator.health()

    def close(self) -> None:
        """Stop the speculator, and the other ranks."""
        self._speculator.close()
        self._executor.close()


def _seed_of(params: SamplingParams) -> int:
    """The unsigned seed of a request; whoever made the request must have chosen one."""
    assert params.greedy or params.seed is not None, "EngineRequest.sampling.seed must be set"
    return (params.seed or 0) & ((1 << 64) - 1)
