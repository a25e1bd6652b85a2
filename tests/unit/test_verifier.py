"""The verifier as the engine uses it: packing, rows of all kinds, faults, log-probabilities, one copy per step."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import pytest
import torch

from ssd_ascend.core.random import Stream
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, Speculation, Verification, VerificationOutcome
from ssd_ascend.runtime.sampler import RowContext, draw, process_logits, row_uniforms
from ssd_ascend.speculation.verifier import Verifier
from tests.unit.reference_law import make_sequence

V, K = 1000, 3
GREEDY = SamplingParams(temperature=0.0)
NAN, INF = float("nan"), float("inf")


def logits_of(rows: int, seed: int = 0, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sequences_of(*params: SamplingParams) -> list[Sequence]:
    return [make_sequence(i + 10, sampling, (1, 2, 3), prompt=2, stops=(9,)) for i, sampling in enumerate(params)]


def spec(tokens: list[list[int]], law: torch.Tensor | None = None, has_law: list[bool] | None = None) -> Speculation:
    padded = torch.tensor([row + [0] * (K - len(row)) for row in tokens])
    known = has_law if has_law is not None else [law is not None] * len(tokens)
    return Speculation(padded, [len(row) for row in tokens], [Source.MISS] * len(tokens), law, known)


def verify(seqs: list[Sequence], speculation: Speculation, logits: torch.Tensor) -> Verification:
    return Verifier(list).verify(seqs, speculation, logits)


def drawn_drafts(seqs: list[Sequence], law: torch.Tensor) -> torch.Tensor:
    """Drafts [B, K] drawn from laws [B, K, V] as a drafter draws them."""
    steps = []
    for j in range(law.shape[1]):
        rows = [RowContext.of(seq, offset=j) for seq in seqs]
        steps.append(draw(law[:, j], row_uniforms(rows, Stream.DRAFT, law.device)))
    return torch.stack(steps, 1)


# -- greedy -----------------------------------------------------------------------------------------------------


def test_greedy_keeps_drafts_while_they_are_the_arg_max() -> None:
    logits = logits_of(4 + 3 + 1 + 4 + 1)
    best = logits.argmax(-1).tolist()
    drafts = [best[0:3], [best[4], 7], [], [7, best[9], best[10]]]
    seqs = sequences_of(*[GREEDY] * 5)  # the fifth finishes its prefill: it has no row in the speculation
    got = verify(seqs, spec(drafts), logits)
    assert got.new_tokens == [best[0:4], best[4:6], [best[7]], [best[8]], [best[12]]]
    counts = [3, 1, 0, 0, 0]
    assert got.outcomes == [
        VerificationOutcome(seq.id, count, new[-1])
        for seq, count, new in zip(seqs, counts, got.new_tokens, strict=True)
    ]
    assert got.logprobs == [None] * 5
    assert got.faults == {}


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.3}])
def test_truncations_and_draft_laws_mean_nothing_to_a_greedy_row(truncation: dict[str, float]) -> None:
    logits = logits_of(4)
    best = logits.argmax(-1).tolist()
    law = torch.full((1, K, V), NAN)
    params = SamplingParams(temperature=0.0, **truncation)  # type: ignore[arg-type]
    assert verify(sequences_of(params), spec([best[:3]], law), logits).new_tokens == [best]


@pytest.mark.parametrize(
    "extra",
    [{"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}, {"repetition_penalty": 1.8}, {"min_tokens": 4}],
    ids=lambda extra: str(extra),
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_work_inside_a_step_as_over_many(extra: dict[str, float], temperature: float) -> None:
    """B09, B10: with point-mass drafts, right or wrong, the answer is the plain one, although every token depends on
    which came before; without the penalty it is another."""
    bias = {9: 2.0} if "min_tokens" in extra else {}
    params = SamplingParams(temperature=temperature, logit_bias=bias, **extra)  # type: ignore[arg-type]
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.6, 2.2, 0.5, 0.1, 0.2, 0.3, 2.9]])

    def answer(sampling: SamplingParams, guess: list[int]) -> list[int]:
        seq, verifier = sequences_of(sampling)[0], Verifier(list)
        while seq.num_output_tokens < 12:
            drafts = guess[seq.num_output_tokens : seq.num_output_tokens + K]
            got = verifier.verify([seq], spec([drafts]), logits.expand(len(drafts) + 1, -1))
            seq.token_ids.extend(got.new_tokens[0])
        return seq.output_token_ids[:12]

    plain = answer(params, [])
    assert answer(params, plain) == plain
    assert answer(params, [3, 2, 9] * 4) == plain
    assert answer(params, [*plain[:5], 0, *plain[6:]]) == plain
    assert answer(SamplingParams(temperature=temperature, logit_bias=bias), []) != plain


# -- sampled ----------------------------------------------------------------------------------------------------


def test_rows_of_all_kinds_get_in_a_crowd_what_they_get_alone() -> None:
    """B13, with speculation on: laws, point masses, declined rows, greedy rows, prefill rows."""
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(), GREEDY, SamplingParams(presence_penalty=1)]
    seqs = sequences_of(*params, SamplingParams(temperature=0.6))
    logits = logits_of(4 + 4 + 1 + 4 + 3 + 1)
    law = (
        logits[torch.tensor([[0, 1, 2], [4, 5, 6], [0, 0, 0], [9, 10, 11], [13, 14, 0]])]
        + logits_of(5 * K, 1).view(5, K, V) / 6
    )
    drafts = drawn_drafts(seqs[:5], law).tolist()
    rows = [drafts[0], [5, 6, 7], [], drafts[3], drafts[4][:2]]
    has_law = [True, False, False, True, True]
    together = verify(seqs, spec(rows, law, has_law), logits)
    start = 0
    for i, seq in enumerate(seqs):
        own = rows[i] if i < 5 else []
        alone = spec([own], law[i : i + 1] if i < 5 else None, [i < 5 and has_law[i]])
        got = verify([seq], alone, logits[start : start + len(own) + 1])
        assert got.new_tokens == [together.new_tokens[i]]
        assert got.outcomes == [together.outcomes[i]]
        start += len(own) + 1
    assert together.outcomes[0].num_accepted > 0  # a draft that close to the target is kept now and then


def test_a_seeded_answer_does_not_depend_on_point_mass_drafts() -> None:
    params = SamplingParams(temperature=1.2, top_k=50)
    logits = logits_of(K + 1)
    [plain] = verify(sequences_of(params), Speculation.declined(1), logits[:1]).new_tokens
    for guess in range(0, V, 97):
        [got] = verify(sequences_of(params), spec([[guess, 3, 4]]), logits).new_tokens
        assert got[0] == plain[0]
    [got] = verify(sequences_of(params), spec([[plain[0], 3, 4]]), logits).new_tokens
    assert got[0] == plain[0]
    assert len(got) >= 2


def test_random_drafts_are_nearly_all_refused() -> None:
    """B19: whether announced as a law (uniform over V) or not."""
    size = 400
    seqs = sequences_of(*[SamplingParams()] * size)
    logits = logits_of(size * (K + 1))
    law = torch.zeros(size, K, V)
    drafts = drawn_drafts(seqs, law)
    for known in (True, False):
        got = verify(seqs, spec(drafts.tolist(), law, [known] * size), logits)
        kept = sum(outcome.num_accepted for outcome in got.outcomes)
        assert kept < 0.2 * size * K
        assert known is False or kept > 0


def test_the_same_law_is_always_accepted() -> None:
    seqs = sequences_of(*[SamplingParams(temperature=0.9, top_p=0.9)] * 300)
    logits = logits_of(300 * (K + 1))
    contexts = [RowContext.of(seq, offset=j) for seq in seqs for j in range(K + 1)]
    law = process_logits(logits, contexts).view(300, K + 1, V)[:, :K]
    got = verify(seqs, spec(drawn_drafts(seqs, law).tolist(), law), logits)
    assert all(outcome.num_accepted == K for outcome in got.outcomes)


def test_a_token_outside_the_support_is_refused_even_by_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """B20, through the whole verifier: every number is 0."""
    monkeypatch.setattr(
        "ssd_ascend.speculation.verifier.row_uniforms", lambda rows, stream, device: torch.zeros(len(rows))
    )
    logits = torch.zeros(K + 1, V)
    logits[:, 5] = 4.0
    law = torch.full((1, K, V), -INF)
    law[..., 7] = 0.0
    for known in (True, False):
        got = verify(sequences_of(SamplingParams(top_k=1)), spec([[7, 7, 7]], law, [known]), logits)
        assert got.new_tokens == [[5]]


# -- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("where", [0, 2])
def test_a_broken_draft_law_counts_as_declined_from_there_on(garbage: float, where: int) -> None:
    """B22: the other rows, and the drafts before it, are judged as ever."""
    seqs = sequences_of(*[SamplingParams()] * 3)
    logits = logits_of(3 * (K + 1))
    law = logits.view(3, K + 1, V)[:, :K].clone()
    drafts = drawn_drafts(seqs, law).tolist()
    good = verify(seqs, spec(drafts, law), logits)
    assert all(outcome.num_accepted == K for outcome in good.outcomes)
    law[1, where, :] = garbage
    got = verify(seqs, spec(drafts, law), logits)
    assert got.new_tokens[0] == good.new_tokens[0]
    assert got.new_tokens[2] == good.new_tokens[2]
    assert got.outcomes[1].num_accepted == where
    row = [RowContext.of(seqs[1], offset=where)]
    plain = draw(process_logits(logits[K + 1 + where][None], row), row_uniforms(row, Stream.RECOVER, logits.device))
    assert got.new_tokens[1] == [*drafts[1][:where], int(plain)]
    assert got.faults == {}


@pytest.mark.parametrize("nonsense", [-1, V, 1 << 40])
@pytest.mark.parametrize("params", [SamplingParams(), GREEDY, SamplingParams(repetition_penalty=1.1)])
def test_drafts_outside_the_vocabulary_are_harmless(nonsense: int, params: SamplingParams) -> None:
    logits = logits_of(K + 1)
    [plain] = verify(sequences_of(params), Speculation.declined(1), logits[:1]).new_tokens
    for law in (None, logits[None, :K]):
        got = verify(sequences_of(params), spec([[nonsense] * K], law), logits)
        assert got.new_tokens == [plain]


def test_a_draft_its_own_law_could_not_give_is_not_taken() -> None:
    logits = logits_of(K + 1)
    best = int(logits[0].argmax())
    law = logits[None, :K].clone()
    law[0, 0, best] = -INF
    [plain] = verify(sequences_of(SamplingParams()), Speculation.declined(1), logits[:1]).new_tokens
    assert verify(sequences_of(SamplingParams()), spec([[best, 1, 2]], law), logits).new_tokens == [plain]


@pytest.mark.parametrize("garbage", [NAN, INF])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=5, presence_penalty=0.5)])
@pytest.mark.parametrize("known", [True, False])
def test_a_broken_target_row_ends_its_own_sequence_only(garbage: float, params: SamplingParams, known: bool) -> None:
    seqs = sequences_of(params, params, params)
    logits = logits_of(3 * (K + 1))
    law = logits.view(3, K + 1, V)[:, :K].clone()
    drafts = drawn_drafts(seqs, law).tolist()
    speculation = spec(drafts, law, [known] * 3)
    good = verify(seqs, speculation, logits)
    logits[K + 1, 77] = garbage
    got = verify(seqs, speculation, logits)
    assert got.new_tokens == [good.new_tokens[0], [], good.new_tokens[2]]
    assert got.outcomes[1] == VerificationOutcome(seqs[1].id, 0, 0)
    assert list(got.faults) == [seqs[1].id]
    assert "position 3" in got.faults[seqs[1].id]


def test_garbage_past_a_refused_draft_harms_nobody() -> None:
    logits = logits_of(K + 1)
    logits[2:] = NAN
    best = logits.argmax(-1).tolist()
    got = verify(sequences_of(GREEDY), spec([[best[0], 7, 8]]), logits)
    assert got.new_tokens == [best[:2]]
    assert got.faults == {}


# -- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}, {"logit_bias": {5: 9.0}}])
@pytest.mark.parametrize("known", [True, False])
def test_logprobs_are_the_models_own_for_every_emitted_token(params: dict, known: bool) -> None:
    """B12: raw law, whatever was done to sample; one entry per emitted token; only for those who asked."""
    asked = [None, 5, 0]
    seqs = sequences_of(*[SamplingParams(logprobs=n, **params) for n in asked])
    logits = logits_of(3 * (K + 1))
    law = process_logits(logits, [RowContext.of(seq, offset=j) for seq in seqs for j in range(K + 1)])
    law = law.view(3, K + 1, V)[:, :K]
    got = verify(seqs, spec(drawn_drafts(seqs, law).tolist(), law, [known] * 3), logits)
    assert got.logprobs[0] is None
    raw = logits.view(3, K + 1, V).double().log_softmax(-1)
    for i, num_top in ((1, 5), (2, 0)):
        entries = got.logprobs[i]
        assert entries is not None
        assert [entry.token for entry in entries] == got.new_tokens[i]
        assert not known or len(entries) == K + 1
        for j, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(raw[i, j, entry.token].item(), abs=1e-5)
            assert entry.rank == 1 + int((raw[i, j] > raw[i, j, entry.token]).sum())
            top = raw[i, j].topk(num_top)
            assert [token for token, _ in entry.top] == top.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


# -- the seam ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(logprobs=3), SamplingParams(top_p=0.5, seed=3)])
def test_a_step_makes_one_copy_and_leaves_its_inputs_alone(params: SamplingParams) -> None:
    copies = []

    def to_host(tensors: Rows[torch.Tensor]) -> list[torch.Tensor]:
        copies.append(len(tensors))
        return list(tensors)

    logits, law = logits_of(K + 1), logits_of(K, 1)[None]
    speculation = spec([[1, 2, 3]], law)
    before = logits.clone(), law.clone()
    Verifier(to_host).verify(sequences_of(params), speculation, logits)
    assert len(copies) == 1
    assert torch.equal(logits, before[0])
    assert torch.equal(law, before[1])


def test_counts_are_released_with_their_sequences() -> None:
    verifier = Verifier(list)
    seqs = sequences_of(SamplingParams(presence_penalty=1.0))
    first = verifier.verify(seqs, Speculation.declined(1), logits_of(1))
    verifier.release([seqs[0].id])
    other = sequences_of(SamplingParams(presence_penalty=1.0))  # the same id and tokens again
    assert verifier.verify(other, Speculation.declined(1), logits_of(1)) == first


def test_a_wrong_number_of_logit_rows_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="2 logit rows for 1"):
        verify(sequences_of(GREEDY), Speculation.declined(1), logits_of(2))
