"""The output side of an engine: user requests in as tokens, text out. `llm.py` and the server each hold one.

Engines deal in tokens and may add several of them to a sequence in one step. Here a request becomes `n` sequences, its
tokens become text one by one, a stop string ends an answer after the very token that completes it, and what is counted
is what was kept: tokens past a stop string are neither shown, nor billed, nor counted as accepted. Torch-free.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from ssd_ascend.core.random import derive_seed
from ssd_ascend.core.request import EngineRequest, SequenceStats, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import FinishReason
from ssd_ascend.core.speculation import Source
from ssd_ascend.engine.answers import AnswerDelta, AnswerStats
from ssd_ascend.errors import RequestError
from ssd_ascend.text.detokenizer import IncrementalDetokenizer, TokenBytes
from ssd_ascend.text.stop import StopChecker, StopMatcher
from ssd_ascend.text.stream import TextStream

_MASK: Final = (1 << 64) - 1


class Submission(NamedTuple):
    """A user request under way: its id here, and the sequences to submit to the engine."""

    request_id: int
    requests: list[EngineRequest]


class Processed(NamedTuple):
    """The deltas of one engine step as text, and the sequences to abort because a stop string ended them."""

    deltas: list[AnswerDelta]
    abort: list[int]


@dataclass(slots=True, eq=False)
class _Open:
    """An answer that is still growing."""

    request_id: int
    index: int
    sampling: SamplingParams
    prompt_tokens: int
    stream: TextStream
    submitted_s: float
    last_s: float
    first_s: float | None = None
    completion_tokens: int = 0
    accepted: int = 0
    knows_sources: bool = True
    engine_stats: SequenceStats = field(default_factory=SequenceStats)


class OutputProcessor:
    """Expands requests and turns the engine's deltas into answers. Not thread-safe: one owner, who drives one engine.

    Sequence ids are unique within one processor; deltas of sequences it no longer knows (aborted ones) are ignored.
    """

    def __init__(
        self, tokenizer: TokenBytes, *, seed: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """seed: with one, requests that bring none draw what they drew when they last came in this order."""
        self._tokenizer = tokenizer
        self._is_seeded = seed is not None
        # unsigned: `random` takes a number and its negative for the same
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed & _MASK)
        self._clock = clock
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}
        self._sequences: dict[int, set[int]] = {}
        self._matchers: WeakValueDictionary[tuple[str, ...], StopMatcher] = WeakValueDictionary()
        """Those in use: the prompts of one request come one by one, and clients send the same stop strings again."""

    @property
    def num_requests(self) -> int:
        """Requests with at least one unfinished answer."""
        return len(self._sequences)

    @property
    def seq_ids(self) -> set[int]:
        """The sequences of unfinished answers."""
        return set(self._open)

    @property
    def num_sequences(self) -> int:
        """Unfinished answers."""
        return len(self._open)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ) -> Submission:
        """Open a request. `continuation` says that the text goes on from a prompt of text (completions, not chat).

        Answer i draws from a seed derived from the request's and i; a request without a seed gets a fresh one, so
        that equal requests one after another do not get equal samples. Where those come from the engine's own seed, the
        request is as reproducible as one that brings its seed.
        """
        request_id, now = next(self._ids), self._clock()
        base_seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        matcher = self._matcher_of(sampling.stop)
        requests: list[EngineRequest] = []
        for index in range(sampling.n):
            seq_id = next(self._ids)
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, skip_special_tokens=skip_special_tokens, continuation=continuation
            )
            checker = StopChecker(matcher, include_stop_str=sampling.include_stop_str_in_output) if matcher else None
            stream = TextStream(detokenizer, checker, min_tokens=sampling.min_tokens)
            own = replace(
                sampling,
                n=1,
                stop=(),  # is ours to find
                seed=_signed(derive_seed(base_seed, index)),
                reproducible=sampling.reproducible or self._is_seeded or sampling.seed is not None,
            )
            self._open[seq_id] = _Open(request_id, index, own, len(prompt_token_ids), stream, now, now)
            requests.append(EngineRequest(id=seq_id, prompt_token_ids=list(prompt_token_ids), sampling=own))
        self._sequences[request_id] = {request.id for request in requests}
        return Submission(request_id, requests)

    def process(self, deltas: Iterable[TokenDelta]) -> Processed:
        """Take what one engine step produced. The caller passes `abort` on to the engine."""
        now = self._clock()
        outputs: list[AnswerDelta] = []
        abort: list[int] = []
        for delta in deltas:
            answer = self._open.get(delta.seq_id)
            if answer is None:
                continue
            output = _take(answer, delta, now)
            outputs.append(output)
            if output.finish_reason is not None:
                self._close(delta.seq_id, answer.request_id)
                if delta.finish_reason is None:
                    abort.append(delta.seq_id)
        return Processed(outputs, abort)

    def is_open(self, request_id: int) -> bool:
        """Whether some answer of a request is still unfinished."""
        return request_id in self._sequences

    def cancel(self, request_id: int) -> list[int]:
        """Forget a request; returns the sequences the engine must abort (none when it had finished)."""
        unfinished = sorted(self._sequences.pop(request_id, ()))
        for seq_id in unfinished:
            del self._open[seq_id]
        return unfinished

    def fail(self, message: str, seq_ids: Iterable[int] | None = None) -> list[AnswerDelta]:
        """End answers with an error: those of `seq_ids`, or, when the engine has died, all that are open."""
        wanted = list(self._open) if seq_ids is None else list(seq_ids)
        errors = [TokenDelta(seq_id=i, token_ids=[], finish_reason=FinishReason.ERROR, error=message) for i in wanted]
        return self.process(errors).deltas

    def refuse(self, seq_id: int, reason: RequestError) -> list[AnswerDelta]:
        """End an answer that the engine would not begin."""
        return [replace(delta, refusal=reason) for delta in self.fail(str(reason), [seq_id])]

    def _matcher_of(self, stops: tuple[str, ...]) -> StopMatcher | None:
        if not stops:
            return None
        matcher = self._matchers.get(stops)
        if matcher is None:
            matcher = self._matchers[stops] = StopMatcher(stops)
        return matcher

    def _close(self, seq_id: int, request_id: int) -> None:
        del self._open[seq_id]
        siblings = self._sequences[request_id]
        siblings.discard(seq_id)
        if not siblings:
            del self._sequences[request_id]


def _take(answer: _Open, delta: TokenDelta, now: float) -> AnswerDelta:
    """One step's tokens of one answer: what counts of them, as text, with everything else cut to the same length."""
    hide_stop = delta.stop_token is not None and not answer.sampling.include_stop_str_in_output
    shown = answer.stream.feed(delta.token_ids, hide_last=hide_stop)
    kept, text = shown.num_tokens, shown.text
    finish_reason = delta.finish_reason
    stop_reason: str | int | None = _named_stop(answer, delta)
    if shown.stop is not None:
        finish_reason, stop_reason = FinishReason.STOP.value, shown.stop
    elif finish_reason is not None:
        text += answer.stream.finish()
    is_first, waited_s = answer.first_s is None, now - answer.last_s
    _count(answer, delta, kept, now)
    failed = finish_reason == FinishReason.ERROR
    return AnswerDelta(
        request_id=answer.request_id,
        index=answer.index,
        text=text,
        token_ids=delta.token_ids[:kept],
        offsets=answer.stream.offsets[answer.completion_tokens - kept : answer.completion_tokens],
        is_first=is_first,
        waited_s=waited_s,
        logprobs=None if delta.logprobs is None else delta.logprobs[:kept],
        sources=None if delta.sources is None else delta.sources[:kept],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=(delta.error or "the engine failed") if failed else None,
        stats=None if finish_reason is None else _final_stats(answer),
    )


def _named_stop(answer: _Open, delta: TokenDelta) -> int | None:
    """The stop token that ended the answer if the request itself named it (an end-of-sequence token is not news)."""
    return delta.stop_token if delta.stop_token in answer.sampling.stop_token_ids else None


def _count(answer: _Open, delta: TokenDelta, kept: int, now: float) -> None:
    if kept:
        answer.first_s = now if answer.first_s is None else answer.first_s
        answer.last_s = now
    answer.completion_tokens += kept
    if delta.sources is not None:
        answer.accepted += sum(source != Source.DECLINED for source in delta.sources[:kept])
    elif delta.token_ids:
        answer.knows_sources = False
    if delta.stats is not None:
        answer.engine_stats = delta.stats


def _final_stats(answer: _Open) -> AnswerStats:
    engine = answer.engine_stats
    accepted = answer.accepted if answer.knows_sources else engine.accepted
    return AnswerStats(
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=engine.cached_tokens,
        completion_tokens=answer.completion_tokens,
        steps=engine.steps,
        drafted=max(engine.drafted, accepted),
        accepted=accepted,
        cache_lookups=engine.lookups,
        cache_hits=engine.hits,
        preemptions=engine.preemptions,
        ttft_s=0.0 if answer.first_s is None else answer.first_s - answer.submitted_s,
        decode_s=0.0 if answer.first_s is None else answer.last_s - answer.first_s,
    )


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is how a request carries its seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
