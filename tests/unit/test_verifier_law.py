"""Every kind of row against exact enumeration on toy models, at sizes that show a bias of half a percent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ssd_ascend.core.random import Stream, uniforms
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import Source, Speculation, Verification
from ssd_ascend.runtime.sampler import RowContext, cache_aware, draw, process_logits
from ssd_ascend.speculation.acceptance import judge_drawn
from ssd_ascend.speculation.verifier import Verifier
from tests.unit.reference_law import assert_follows, bias_of, make_sequence, reference_law

N = 200_000
INF = float("inf")


def numbers(stream: Stream, position: int, size: int = N, first: int = 0) -> torch.Tensor:
    return torch.from_numpy(uniforms(np.arange(first, first + size), position, stream))


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def judge_one(p: torch.Tensor, q: torch.Tensor, size: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One draft per trial, drawn from q [V], judged by p [V]: (first token emitted, accepted, draft)."""
    drafts = draw(q.expand(size, -1), numbers(Stream.DRAFT, 4, size))
    weights = p.softmax(-1).expand(2, -1)
    verdict = judge_drawn(
        weights,
        weights.sum(-1),
        torch.tensor([0, 1]).expand(size, -1),
        q.expand(size, 1, -1),
        drafts[:, None],
        torch.ones(size, dtype=torch.int64),
        numbers(Stream.ACCEPT, 4, size)[:, None],
        torch.stack([numbers(Stream.RECOVER, 4, size), numbers(Stream.RECOVER, 5, size)], -1),
    )
    return torch.where(verdict.accepted > 0, drafts, verdict.token), verdict.accepted, drafts


# -- the ratio test -------------------------------------------------------------------------------------------

TARGET = torch.tensor([1.1, -0.4, 0.6, -2.0, 0.2])
DRAFT = torch.tensor([0.2, 0.9, 0.3, -0.5, -1.5])


def law_of(logits: torch.Tensor, **params: object) -> torch.Tensor:
    row = RowContext.of(make_sequence(0, SamplingParams(**params)))  # type: ignore[arg-type]
    return process_logits(logits[None], [row])[0]


PAIRS = {
    "plain": (law_of(TARGET), law_of(DRAFT)),
    "the same law": (law_of(TARGET), law_of(TARGET)),
    "another temperature": (law_of(TARGET, temperature=0.7), law_of(DRAFT, temperature=1.6)),
    "greedy draft as a law": (law_of(TARGET), law_of(DRAFT, temperature=0.0)),
    "top_k on both": (law_of(TARGET, top_k=3), law_of(DRAFT, top_k=3)),
    "top_p on the target only": (law_of(TARGET, top_p=0.7), law_of(DRAFT)),
    "min_p on the draft only": (law_of(TARGET), law_of(DRAFT, min_p=0.3)),
    "reduced draft vocabulary": (law_of(TARGET), DRAFT + log(1, 0, 1, 0, 1)),
    "no token in common": (TARGET + log(1, 0, 1, 0, 1), DRAFT + log(0, 1, 0, 1, 0)),
    "cache-aware, C 0.5": (law_of(TARGET), cache_aware(law_of(DRAFT)[None], 1, 0.5)[0]),
    "cache-aware, C 0.1, ties": (law_of(TARGET), cache_aware(torch.tensor([[0.0, -1, -1, -1, -2]]), 2, 0.1)[0]),
    "a law sent in bf16": (law_of(TARGET), law_of(DRAFT).to(torch.bfloat16)),
    "B18": (log(0.6, 0.4), log(0.5, 0.5)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_drawn_drafts_leave_the_target_law(name: str) -> None:
    p, q = PAIRS[name]
    tokens, accepted, drafts = judge_one(p, q)
    want_p, want_q = p.double().softmax(-1).numpy(), q.double().softmax(-1).numpy()
    assert_follows(drafts, want_q)
    assert_follows(tokens, want_p)
    overlap = float(np.minimum(want_p, want_q).sum())  # no exact rule can accept more
    assert float(accepted.double().mean()) == pytest.approx(overlap, abs=0.005)


def test_the_numbers_of_b18() -> None:
    """P(0) = 0.6; accept-if-arg-max would give 0.80 and accepting always 0.50, and both would be seen."""
    tokens, _, drafts = judge_one(*PAIRS["B18"])
    assert float((tokens == 0).double().mean()) == pytest.approx(0.6, abs=0.004)
    recovered = draw(log(0.6, 0.4).expand(N, -1), numbers(Stream.RECOVER, 4))
    wrong = torch.where(drafts == 0, 0, recovered)
    assert float((wrong == 0).double().mean()) == pytest.approx(0.8, abs=0.004)
    for samples in (wrong, drafts):
        assert bias_of(samples, np.array([0.6, 0.4]))[1] > 10


def test_shared_randomness_would_be_seen() -> None:
    """Why the streams differ: a draft that reuses the recovery number breaks the law (the test has teeth)."""
    p, q = PAIRS["plain"]
    drafts = draw(q.expand(N, -1), numbers(Stream.RECOVER, 4))
    keep = numbers(Stream.ACCEPT, 4) * q.softmax(-1)[drafts] < p.softmax(-1)[drafts]
    rest = (p.softmax(-1) - q.softmax(-1)).clamp(min=0).log()
    tokens = torch.where(keep, drafts, draw(rest.expand(N, -1), numbers(Stream.RECOVER, 4)))
    assert bias_of(tokens, p.double().softmax(-1).numpy())[1] > 10


def test_joint_triples_over_whole_rounds() -> None:
    """K=3, V=5, laws that depend on position and last token: rounds repeat until three tokens stand. Positions after a
    refusal are drafted, tested and drawn again with the same numbers, as in the engine: that must do no harm."""
    vocab, lookahead = 5, 3
    generator = torch.Generator().manual_seed(5)
    p = torch.randn(7, vocab, vocab, generator=generator) * 1.2  # [position, last token, V]
    q = p + torch.randn(7, vocab, vocab, generator=generator)
    tokens = torch.zeros(N, 8, dtype=torch.int64)
    length = torch.zeros(N, dtype=torch.int64)
    for _ in range(3):
        for done in range(3):
            index = (length == done).nonzero()[:, 0]
            if not len(index):
                continue
            last = tokens[index, done - 1] if done else torch.zeros(len(index), dtype=torch.int64)
            p_rows, q_rows, drafts = [], [], []
            for j in range(lookahead):
                p_rows.append(p[done + j, last])
                q_rows.append(q[done + j, last])
                last = draw(q_rows[-1], numbers(Stream.DRAFT, done + j)[index])
                drafts.append(last)
            p_rows.append(p[done + lookahead, last])
            weights = torch.stack(p_rows, 1).flatten(0, 1).softmax(-1)
            rows = torch.arange(len(weights)).view(-1, lookahead + 1)
            accept = torch.stack([numbers(Stream.ACCEPT, done + j)[index] for j in range(lookahead)], -1)
            recover = torch.stack([numbers(Stream.RECOVER, done + j)[index] for j in range(lookahead + 1)], -1)
            block = torch.stack(drafts, -1)
            counts = torch.full((len(index),), lookahead)
            verdict = judge_drawn(
                weights, weights.sum(-1), rows, torch.stack(q_rows, 1), block, counts, accept, recover
            )
            for j in range(lookahead):
                tokens[index, done + j] = block[:, j]
            tokens[index, done + verdict.accepted] = verdict.token
            length[index] += verdict.accepted + 1
    assert int(length.min()) >= 3
    p = p.double().softmax(-1)
    want = torch.einsum("a,ab,bc->abc", p[0, 0], p[1], p[2]).flatten().numpy()
    assert_follows(tokens[:, 0] * 25 + tokens[:, 1] * 5 + tokens[:, 2], want, distance=0.02)


# -- whole verifier: rows of all kinds beside each other ------------------------------------------------------

SIZE = 12_000
LOGITS = torch.tensor(
    [[1.0, 0.3, -0.5, 0.8, -1.0, 0.1], [0.2, 1.2, 0.4, -0.3, 0.9, -0.8], [0.5, 0.0, 0.2, 0.7, -0.4, 1.0]]
)
DRAFTED = LOGITS[:2].flip(1)
SHAPES = {
    "plain": {},
    "truncated": {"temperature": 1.3, "top_k": 5, "top_p": 0.92, "min_p": 0.05},
    "penalized": {"repetition_penalty": 1.5, "frequency_penalty": 1.1, "presence_penalty": -0.4, "min_tokens": 3},
    "biased": {"temperature": 0.8, "logit_bias": {2: 2.0, 0: -1.5}},
}
TOKENS, STOPS = (0, 1, 3), (4,)
KINDS = ["law", "law, colder draft", "point", "declined", "broken", "greedy"]


@dataclass(frozen=True)
class Crowd:
    """What one Verifier said of SIZE sequences of every kind in one batch; those of a kind lie len(KINDS) apart."""

    params: dict[str, SamplingParams]
    verification: Verification

    def of(self, kind: str) -> list[list[int]]:
        return self.verification.new_tokens[KINDS.index(kind) :: len(KINDS)]

    def law(self, kind: str, *more: int) -> np.ndarray:
        logits = LOGITS[len(more)].tolist()
        return reference_law(logits, self.params[kind], (*TOKENS, *more), prompt=2, stops=STOPS)


@pytest.fixture(scope="module", params=list(SHAPES))
def crowd(request: pytest.FixtureRequest) -> Crowd:
    """Two drafts per sequence. The trials share an id, as they share their tokens; their seeds differ."""
    shape = SHAPES[request.param]
    params = {kind: SamplingParams(**{**shape, "temperature": 0.0} if kind == "greedy" else shape) for kind in KINDS}
    total = SIZE * len(KINDS)
    seqs = [
        make_sequence(0, params[KINDS[i % len(KINDS)]], TOKENS, prompt=2, stops=STOPS, seed=i) for i in range(total)
    ]
    tokens, laws = torch.full((total, 2), 3), torch.zeros(total, 2, 6)
    for kind, temperature in (("law", None), ("law, colder draft", 0.4)):
        index = np.arange(KINDS.index(kind), total, len(KINDS))
        before = torch.zeros(SIZE, dtype=torch.int64)
        for j in range(2):
            rows = draft_law(params[kind], temperature, j)[before]
            before = draw(rows, torch.from_numpy(uniforms(index, 3 + j, Stream.DRAFT)))
            laws[index, j], tokens[index, j] = rows, before
    laws[KINDS.index("broken") :: len(KINDS)] = float("nan")
    num_tokens = [0 if kind == "declined" else 2 for kind in KINDS] * SIZE
    has_law = [kind not in ("point", "declined") for kind in KINDS] * SIZE
    speculation = Speculation(tokens, num_tokens, [Source.MISS] * total, laws, has_law)
    logits = torch.cat([LOGITS[: count + 1] for count in num_tokens])
    return Crowd(params, Verifier(list).verify(seqs, speculation, logits))


def draft_law(params: SamplingParams, temperature: float | None, j: int) -> torch.Tensor:
    """Log-weights [6, V] of draft j, one row per possible draft before it, with the processors of the request."""
    rows = []
    for before in range(6):
        law = reference_law(DRAFTED[j].tolist(), params, (*TOKENS, *([before] * j)), prompt=2, stops=STOPS)
        rows.append(torch.from_numpy(law).log() / (temperature or 1.0))
    return torch.stack(rows).float()


@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_token_follow_the_target_law(crowd: Crowd, kind: str) -> None:
    """The second token's law knows the first one: penalties must count the draft inside the step (B10)."""
    emitted = crowd.of(kind)
    assert_follows(torch.tensor([new[0] for new in emitted]), crowd.law(kind), distance=0.02)
    if kind in ("declined", "broken"):
        assert all(len(new) == 1 for new in emitted)
    for token in range(6):
        second = torch.tensor([new[1] for new in emitted if len(new) > 1 and new[0] == token], dtype=torch.int64)
        if len(second) > 500:
            assert_follows(second, crowd.law(kind, token), distance=3.0 / len(second) ** 0.5)


def test_a_point_mass_is_accepted_as_often_as_its_token_is_likely(crowd: Crowd) -> None:
    kept = [outcome.num_accepted > 0 for outcome in crowd.verification.outcomes[KINDS.index("point") :: len(KINDS)]]
    assert np.mean(kept) == pytest.approx(crowd.law("point")[3], abs=0.015)


@pytest.mark.parametrize("rule", ["point", "declined"])
def test_the_numbers_of_b18_for_the_other_rules(rule: str) -> None:
    size, params = 100_000, SamplingParams()
    seqs = [make_sequence(0, params, seed=i) for i in range(size)]
    drafts = draw(log(0.5, 0.5).expand(size, -1), numbers(Stream.DRAFT, 2, size))[:, None]
    speculation = Speculation(drafts, [1] * size, [Source.MISS] * size, None, [False] * size)
    if rule == "declined":
        speculation = Speculation.declined(size)
    logits = log(0.6, 0.4).expand(size * (2 if rule == "point" else 1), -1)
    new = Verifier(list).verify(seqs, speculation, logits).new_tokens
    assert float(np.mean([tokens[0] == 0 for tokens in new])) == pytest.approx(0.6, abs=0.004 * 2**0.5)
