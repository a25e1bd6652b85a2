"""Hypothesis strategies for messages of every kind."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import VerificationOutcome
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

token = st.integers(0, (1 << 31) - 1)
sequence_id = st.integers(0, (1 << 63) - 1)
length = st.integers(0, (1 << 31) - 1)
counter = st.integers(0, (1 << 63) - 1)
float_dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def features(draw: st.DrawFn, rows: int) -> torch.Tensor | None:
    if draw(st.booleans()):
        return None
    width = draw(st.integers(0, 5))
    tensor = torch.randn(rows, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    tensor = tensor.to(draw(float_dtype))
    return tensor.t().contiguous().t() if draw(st.booleans()) else tensor  # also what is not contiguous must travel


@st.composite
def slots(draw: st.DrawFn, rows: int) -> torch.Tensor | None:
    return torch.arange(rows).unsqueeze(1) if draw(st.booleans()) else None


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.none() | st.integers(1, 1 << 31))
    return SamplingParams(
        temperature=draw(st.floats(0.0, 100.0)),
        top_p=draw(st.floats(0.001, 1.0)),
        top_k=draw(st.integers(-1, 1 << 31)),
        min_p=draw(st.floats(0.0, 1.0)),
        seed=draw(st.none() | st.integers(-(1 << 63), (1 << 63) - 1)),
        presence_penalty=draw(st.floats(-2.0, 2.0)),
        frequency_penalty=draw(st.floats(-2.0, 2.0)),
        repetition_penalty=draw(st.floats(0.1, 100.0)),
        logit_bias=draw(st.dictionaries(token, st.floats(-100.0, 100.0), max_size=4)),
        min_tokens=draw(st.integers(0, max_tokens or 1 << 31)),
        max_tokens=max_tokens,
        stop=tuple(draw(st.lists(st.text(st.characters(), min_size=1, max_size=6), max_size=4))),
        stop_token_ids=tuple(draw(st.lists(token, max_size=3))),
        ignore_eos=draw(st.booleans()),
        reproducible=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
        n=draw(st.integers(1, 128)),
    )


@st.composite
def attaches(draw: st.DrawFn) -> Attach:
    tokens = draw(st.lists(token, min_size=1, max_size=9))
    return Attach(
        seq_id=draw(sequence_id),
        token_ids=tokens,
        num_prompt_tokens=draw(st.integers(0, len(tokens))),
        sampling=draw(sampling()),
        seed=draw(st.integers(-(1 << 63), (1 << 64) - 1)),
        stop_ids=draw(st.frozensets(token, max_size=4)),
        features=draw(features(len(tokens) - 1)),
        slots=draw(slots(len(tokens) - 1)),
    )


@st.composite
def updates(draw: st.DrawFn) -> Update:
    new_tokens = draw(st.lists(token, min_size=1, max_size=6))
    return Update(
        outcome=VerificationOutcome(draw(sequence_id), draw(length), draw(token)),
        num_tokens_before=draw(length),
        new_tokens=new_tokens,
        features=draw(features(len(new_tokens))),
        slots=draw(slots(len(new_tokens))),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        number=draw(counter),
        released=draw(st.lists(sequence_id, max_size=3)),
        attaches=draw(st.lists(attaches(), max_size=2)),
        updates=draw(st.lists(updates(), max_size=3)),
    )


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    rows, lookahead, vocab = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 5))
    has_law = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    law = torch.randn(sum(has_law), lookahead, vocab, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    law[..., 1:][law[..., 1:] > 0.5] = -torch.inf  # a cut-off token, as top-p makes them
    return Answer(
        number=draw(counter),
        seq_ids=draw(st.lists(sequence_id, min_size=rows, max_size=rows)),
        sources=draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)),
        drafts=draw(st.lists(st.lists(token, max_size=lookahead), min_size=rows, max_size=rows)),
        has_law=has_law,
        law=law.to(draw(float_dtype)) if any(has_law) else None,
        stats=draw(worker_stats()),
    )


@st.composite
def worker_stats(draw: st.DrawFn) -> WorkerStats:
    names = ("cached_drafts", "used_drafts", "cache_bytes")
    return WorkerStats(idle_s=draw(st.floats(0.0, 1e9)), **{name: draw(counter) for name in names})


@st.composite
def foreseen(draw: st.DrawFn) -> Foreseen:
    rows, lookahead = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    counts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    size = sum(counts) * (3 + lookahead)
    return Foreseen(
        number=draw(counter),
        lookahead=lookahead,
        seq_ids=draw(st.lists(sequence_id, min_size=rows, max_size=rows)),
        num_tokens=draw(st.lists(length, min_size=rows, max_size=rows)),
        counts=counts,
        entries=draw(st.lists(token, min_size=size, max_size=size)),
        worth_from=draw(length),
        stats=draw(worker_stats()),
    )


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    vocab, draft_vocab = draw(st.integers(1, (1 << 31) - 1)), draw(st.integers(1, 50))
    return Hello(
        version=draw(st.integers(0, 1 << 30)),
        target_vocab=vocab,
        draft_vocab=draft_vocab,
        feature_width=draw(length),
        lookahead=draw(st.integers(0, 64)),
        drafter=draw(st.text(st.characters(), max_size=20)),
        to_target=torch.randint(0, vocab, (draft_vocab,)) if draw(st.booleans()) else None,
        target=draw(st.text(st.characters(), max_size=20)),
        max_model_len=draw(length),
        reads_features=draw(st.booleans()),
    )


refusals = st.builds(Refusal, st.text(st.characters(), max_size=40))
messages: st.SearchStrategy[Message] = hellos() | requests() | answers() | foreseen() | st.just(Shutdown()) | refusals
