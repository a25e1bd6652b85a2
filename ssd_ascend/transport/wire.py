"""Messages to bytes and back: `encode` and `decode`, called by every transport that leaves the process.

A fixed layout, never pickle: the other side may be another host. `decode` believes nothing; whatever is out of range
is a `TransportError` that names it, so that nonsense costs a worker and never the server. Decoded tensors are views
of the frame that was received.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from ssd_ascend.core.grammar import Grammar, GrammarKind
from ssd_ascend.core.sampling import MAX_STOP_STRINGS, SamplingParams
from ssd_ascend.core.speculation import Source, VerificationOutcome
from ssd_ascend.errors import RequestError, TransportError
from ssd_ascend.transport.frame import FLOAT_DTYPES, MAX_MESSAGE_BYTES, FrameReader, FrameWriter
from ssd_ascend.transport.messages import (
    Answer,
    Attach,
    Foreseen,
    Hello,
    Message,
    Refusal,
    Request,
    Shutdown,
    Update,
    WorkerStats,
)

_INT64_MAX: Final = (1 << 63) - 1
_INT64_MIN: Final = -(1 << 63)
_MAX_ID: Final = (1 << 31) - 1
"""Of tokens and of lengths."""
_MAX_NAME_BYTES: Final = 256
_MAX_REASON_BYTES: Final = 4096
_MAX_STOP_BYTES: Final = 1 << 20
_MAX_GRAMMAR_BYTES: Final = 1 << 20
_GRAMMARS: Final = tuple(GrammarKind)
_LAST_SOURCE: Final = int(max(Source))
_IDS: Final = frozenset({torch.int64})
_HELLO, _REQUEST, _ANSWER, _SHUTDOWN, _REFUSAL, _FORESEEN = 1, 2, 3, 4, 5, 6


def encode(message: Message, *, limit: int = MAX_MESSAGE_BYTES) -> bytearray:
    """The message as one frame; TransportError when it cannot travel. Tensors may lie on any device."""
    w = FrameWriter()
    match message:
        case Request():
            _put_request(w, message)
            return w.finish(_REQUEST, limit=limit)
        case Answer():
            _put_answer(w, message)
            return w.finish(_ANSWER, limit=limit)
        case Foreseen():
            _put_foreseen(w, message)
            return w.finish(_FORESEEN, limit=limit)
        case Hello():
            _put_hello(w, message)
            return w.finish(_HELLO, limit=limit)
        case Shutdown():
            return w.finish(_SHUTDOWN, limit=limit)
        case Refusal(reason):
            w.text(reason)
            return w.finish(_REFUSAL, limit=limit)


def decode(frame: bytearray, *, limit: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in a frame, its tensors on the host; TransportError naming what is wrong with it."""
    r = FrameReader(frame, limit=limit)
    message: Message
    match r.kind:
        case 2:
            message = _get_request(r)
        case 3:
            message = _get_answer(r)
        case 6:
            message = _get_foreseen(r)
        case 1:
            message = _get_hello(r)
        case 4:
            message = Shutdown()
        case 5:
            message = Refusal(r.text("reason", _MAX_REASON_BYTES))
        case other:
            raise TransportError(f"message kind {other}: expected 1 to 6")
    r.finish()
    return message


def _put_hello(w: FrameWriter, hello: Hello) -> None:
    w.words += (hello.version, hello.target_vocab, hello.draft_vocab, hello.feature_width, hello.lookahead)
    w.words += (hello.max_model_len, int(hello.reads_features))
    w.text(hello.drafter)
    w.text(hello.target)
    w.tensor(hello.to_target)


def _get_hello(r: FrameReader) -> Hello:
    version = r.word("version", 0, _MAX_ID)
    target_vocab = r.word("target_vocab", 1, _MAX_ID)
    draft_vocab = r.word("draft_vocab", 1, _MAX_ID)
    feature_width = r.word("feature_width", 0, _MAX_ID)
    lookahead = r.word("lookahead", 0, _MAX_ID)
    max_model_len = r.word("max_model_len", 0, _MAX_ID)
    reads_features = bool(_flag(r, "reads_features"))
    drafter = r.text("drafter", _MAX_NAME_BYTES)
    target = r.text("target", _MAX_NAME_BYTES)
    to_target = r.tensor("to_target", _IDS, (draft_vocab,))
    if to_target is not None:
        _check_ids("to_target", to_target, target_vocab - 1)
    return Hello(
        version=version,
        target_vocab=target_vocab,
        draft_vocab=draft_vocab,
        feature_width=feature_width,
        lookahead=lookahead,
        drafter=drafter,
        to_target=to_target,
        target=target,
        max_model_len=max_model_len,
        reads_features=reads_features,
    )


def _put_request(w: FrameWriter, request: Request) -> None:
    w.words += (request.number, len(request.attaches), len(request.updates))
    w.ints(request.released)
    w.ints(request.fan_out)
    for attach in request.attaches:
        _put_attach(w, attach)
    for update in request.updates:
        w.words += (*update.outcome, update.num_tokens_before)
        w.ints(update.new_tokens)
        w.tensor(update.features)
        w.tensor(update.slots)


def _get_request(r: FrameReader) -> Request:
    number = r.word("request number", 0, _INT64_MAX)
    num_attaches, num_updates = r.count("attaches"), r.count("updates")
    released = r.ints("released", 0, _INT64_MAX)
    fan_out = r.ints("fan_out", 0, _MAX_ID)
    attaches = [_get_attach(r) for _ in range(num_attaches)]
    updates = [_get_update(r) for _ in range(num_updates)]
    return Request(number=number, released=released, attaches=attaches, updates=updates, fan_out=fan_out)


def _get_update(r: FrameReader) -> Update:
    outcome = VerificationOutcome(
        r.word("seq_id", 0, _INT64_MAX), r.word("num_accepted", 0, _MAX_ID), r.word("recovery_token", 0, _MAX_ID)
    )
    before = r.word("num_tokens_before", 0, _MAX_ID)
    new_tokens = r.ints("new_tokens", 0, _MAX_ID)
    features = r.tensor("features", FLOAT_DTYPES, (len(new_tokens), None))
    slots = r.tensor("slots", _IDS, (len(new_tokens), 1))
    return Update(outcome=outcome, num_tokens_before=before, new_tokens=new_tokens, features=features, slots=slots)


def _put_attach(w: FrameWriter, attach: Attach) -> None:
    w.words += (attach.seq_id, attach.num_prompt_tokens)
    _put_seed(w, attach.seed)
    w.ints(attach.token_ids)
    w.ints(sorted(attach.stop_ids))
    _put_sampling(w, attach.sampling)
    w.tensor(attach.features)
    w.tensor(attach.slots)


def _get_attach(r: FrameReader) -> Attach:
    seq_id = r.word("seq_id", 0, _INT64_MAX)
    num_prompt_tokens = r.word("num_prompt_tokens", 0, _MAX_ID)
    seed = _get_seed(r)
    token_ids = r.ints("token_ids", 0, _MAX_ID)
    if not token_ids or num_prompt_tokens > len(token_ids):
        raise TransportError(f"sequence {seq_id} has {len(token_ids)} tokens, {num_prompt_tokens} of them its prompt")
    stop_ids = frozenset(r.ints("stop_ids", 0, _MAX_ID))
    sampling = _get_sampling(r)
    features = r.tensor("features", FLOAT_DTYPES, (len(token_ids) - 1, None))
    slots = r.tensor("slots", _IDS, (len(token_ids) - 1, 1))
    return Attach(
        seq_id=seq_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling,
        seed=seed,
        stop_ids=stop_ids,
        features=features,
        slots=slots,
    )


def _put_seed(w: FrameWriter, seed: int) -> None:
    """Seeds are signed or unsigned 64-bit numbers; the first word says which half an unsigned one lies in."""
    high = seed > _INT64_MAX
    w.words += (int(high), seed - (1 << 64) if high else seed)


def _get_seed(r: FrameReader) -> int:
    high = _flag(r, "seed is above int64")
    return r.word("seed", _INT64_MIN, -1 if high else _INT64_MAX) + (high << 64)


def _put_optional(w: FrameWriter, value: int | None) -> None:
    w.words += (0, 0) if value is None else (1, value)


def _get_optional(r: FrameReader, what: str) -> int | None:
    present = _flag(r, what)
    value = r.word(what, _INT64_MIN, _INT64_MAX)
    return value if present else None


def _flag(r: FrameReader, what: str) -> int:
    return r.word(what, 0, 1)


def _put_sampling(w: FrameWriter, s: SamplingParams) -> None:
    w.floats += (s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
    w.words += (s.top_k, s.min_tokens)
    w.words += (int(s.ignore_eos), int(s.include_stop_str_in_output), int(s.reproducible), s.n)
    for value in (s.seed, s.max_tokens, s.logprobs):
        _put_optional(w, value)
    w.ints(list(s.logit_bias))
    w.floats += s.logit_bias.values()
    w.ints(s.stop_token_ids)
    w.words.append(len(s.stop))
    for stop in s.stop:
        w.text(stop)
    w.words.append(int(s.grammar is not None))
    if s.grammar is not None:
        w.words += (_GRAMMARS.index(s.grammar.kind), int(s.grammar.strict))
        w.text(s.grammar.source)


def _get_sampling(r: FrameReader) -> SamplingParams:
    """Ranges are the business of SamplingParams itself, which checks them as for any client."""
    temperature, top_p, min_p, presence, frequency, repetition = r.take_floats(6)
    top_k, min_tokens = r.take(2)
    ignore_eos, include_stop = _flag(r, "ignore_eos"), _flag(r, "include_stop_str_in_output")
    reproducible = _flag(r, "reproducible")
    (n,) = r.take(1)
    seed, max_tokens, logprobs = (_get_optional(r, what) for what in ("seed", "max_tokens", "logprobs"))
    biased = r.ints("logit_bias", 0, _MAX_ID)
    bias = dict(zip(biased, r.take_floats(len(biased)), strict=True))
    stop_token_ids = tuple(r.ints("stop_token_ids", 0, _MAX_ID))
    num_stops = r.word("number of stop strings", 0, MAX_STOP_STRINGS)
    stop = tuple(r.text("stop string", _MAX_STOP_BYTES) for _ in range(num_stops))
    grammar = _get_grammar(r)
    try:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            logit_bias=bias,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(ignore_eos),
            include_stop_str_in_output=bool(include_stop),
            reproducible=bool(reproducible),
            logprobs=logprobs,
            n=n,
            grammar=grammar,
        )
    except RequestError as error:
        raise TransportError(f"sampling parameters: {error}") from error


def _get_grammar(r: FrameReader) -> Grammar | None:
    if not _flag(r, "grammar"):
        return None
    kind = _GRAMMARS[r.word("kind of grammar", 0, len(_GRAMMARS) - 1)]
    strict = bool(_flag(r, "strict"))
    return Grammar(kind, r.text("grammar", _MAX_GRAMMAR_BYTES), strict)


def _put_foreseen(w: FrameWriter, foreseen: Foreseen) -> None:
    w.words += (foreseen.number, foreseen.lookahead, foreseen.worth_from)
    for values in (foreseen.seq_ids, foreseen.num_tokens, foreseen.counts, foreseen.entries):
        w.ints(values)
    _put_stats(w, foreseen.stats)


def _get_foreseen(r: FrameReader) -> Foreseen:
    number, lookahead = r.word("number foreseen for", 0, _INT64_MAX), r.word("lookahead", 0, _MAX_ID)
    worth_from = r.word("worth_from", 0, _MAX_ID)
    seq_ids = r.ints("seq_ids", 0, _INT64_MAX)
    num_tokens, counts = r.ints("num_tokens", 0, _MAX_ID), r.ints("counts", 0, _MAX_ID)
    entries = r.ints("entries", 0, _MAX_ID)
    if not len(seq_ids) == len(num_tokens) == len(counts) or sum(counts) * (3 + lookahead) != len(entries):
        lengths = (len(seq_ids), len(num_tokens), len(counts), len(entries))
        raise TransportError(f"seq_ids, num_tokens, counts and entries of what was foreseen have lengths {lengths}")
    return Foreseen(
        number=number,
        lookahead=lookahead,
        seq_ids=seq_ids,
        num_tokens=num_tokens,
        counts=counts,
        entries=entries,
        worth_from=worth_from,
        stats=_get_stats(r),
    )


def _put_answer(w: FrameWriter, answer: Answer) -> None:
    w.words.append(answer.number)
    w.ints(answer.seq_ids)
    w.ints(answer.sources)
    w.ints(answer.has_law)
    w.words.append(len(answer.drafts))
    for drafts in answer.drafts:
        w.ints(drafts)
    w.tensor(answer.law)
    _put_stats(w, answer.stats)


def _get_answer(r: FrameReader) -> Answer:
    number = r.word("answer number", 0, _INT64_MAX)
    seq_ids = r.ints("seq_ids", 0, _INT64_MAX)
    sources = r.ints("sources", 0, _LAST_SOURCE)
    has_law = r.ints("has_law", 0, 1)
    drafts = [r.ints("drafts", 0, _MAX_ID) for _ in range(r.count("rows of drafts"))]
    lengths = (len(seq_ids), len(sources), len(has_law), len(drafts))
    if min(lengths) != max(lengths):
        raise TransportError(f"seq_ids, sources, has_law and drafts of one answer have {lengths} rows")
    law = r.tensor("law", FLOAT_DTYPES, (sum(has_law), None, None))
    if law is not None or any(has_law):
        _check_law(law, [len(row) for row, has in zip(drafts, has_law, strict=True) if has])
    return Answer(
        number=number,
        seq_ids=seq_ids,
        sources=sources,
        drafts=drafts,
        has_law=[has == 1 for has in has_law],
        law=law,
        stats=_get_stats(r),
    )


def _put_stats(w: FrameWriter, stats: WorkerStats) -> None:
    w.floats.append(stats.idle_s)
    w.words += (stats.cached_drafts, stats.used_drafts, stats.cache_bytes)


def _get_stats(r: FrameReader) -> WorkerStats:
    (idle_s,) = r.take_floats(1)
    counts = r.take(3)
    if not (math.isfinite(idle_s) and idle_s >= 0.0 and min(counts) >= 0):
        raise TransportError(f"worker statistics: idle_s {idle_s}, counts {counts}: expected finite, none below 0")
    cached_drafts, used_drafts, cache_bytes = counts
    return WorkerStats(idle_s=idle_s, cached_drafts=cached_drafts, used_drafts=used_drafts, cache_bytes=cache_bytes)


def _check_ids(what: str, ids: torch.Tensor, high: int) -> None:
    if ids.numel():
        least, most = (int(bound) for bound in ids.aminmax())
        if least < 0 or most > high:
            raise TransportError(f"{what} holds {least if least < 0 else most}: expected 0 to {high}")


def _check_law(law: torch.Tensor | None, lengths: Iterable[int]) -> None:
    """One pass over the used positions: the largest log-weight is finite, hence no NaN, no +inf, and not all -inf."""
    lengths = list(lengths)
    if law is None:
        if lengths:
            raise TransportError(f"{len(lengths)} rows were drawn from a law that was not sent")
        return
    if not lengths or law.shape[2] == 0 or max(lengths) > law.shape[1]:
        raise TransportError(f"a law of shape {list(law.shape)} for rows of {lengths} drafts")
    whole = min(lengths) == law.shape[1]
    used = law if whole else torch.cat([row[:length] for row, length in zip(law, lengths, strict=True)])
    if used.numel() and not bool(used.amax(dim=-1).isfinite().all()):
        raise TransportError("the law of a draft holds NaN or +inf, or no token at all")
