"""The law: every processor against a plain second implementation, and draws that follow it exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend.core.random import Stream, uniforms
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.runtime.sampler import (
    RowContext,
    TokenCounts,
    cache_aware,
    draw,
    draw_weights,
    process_logits,
    row_uniforms,
    shape_logits,
    top_tokens,
)
from tests.unit.reference_law import assert_follows, bias_of, make_sequence, reference_law

V = 11
TOKENS, PROMPT, STOPS = (1, 2, 2, 5, 7, 7, 7, 3), 3, (4, 9)
LAWS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 4},
    "top_k 1": {"top_k": 1, "temperature": 2.0},
    "top_k over V": {"top_k": 500},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "all truncations": {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.5},
    "bias": {"logit_bias": {0: 3.0, 10: -100.0, 500: 5.0}},
    "min_tokens": {"min_tokens": 6},
    "min_tokens reached": {"min_tokens": 5},
    "greedy, shaped": {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": {2: 4.0}, "min_tokens": 9},
    "everything": {
        "temperature": 0.8, "top_k": 7, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {4: 2.0, 6: 1.0}, "min_tokens": 20,
    },
}  # fmt: skip


def logits_of(rows: int, vocab: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def context(seq_id: int = 0, **params: object) -> RowContext:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return RowContext.of(make_sequence(seq_id, sampling, TOKENS, prompt=PROMPT, stops=STOPS))


def expected(logits: torch.Tensor, params: dict[str, object]) -> np.ndarray:
    shown = {**params, "logit_bias": {k: v for k, v in params.get("logit_bias", {}).items() if k < V}}  # type: ignore
    return reference_law(logits.tolist(), SamplingParams(**shown), TOKENS, prompt=PROMPT, stops=STOPS)  # type: ignore


@pytest.mark.parametrize("name", LAWS)
def test_each_law_equals_the_plain_second_implementation(name: str) -> None:
    logits = logits_of(4)
    law = process_logits(logits, [context(i, **LAWS[name]) for i in range(4)], TokenCounts())
    for row in range(4):
        np.testing.assert_allclose(law[row].softmax(-1), expected(logits[row], LAWS[name]), atol=2e-6)


def test_a_row_of_a_mixed_batch_has_the_law_it_has_alone() -> None:
    """Stages run on just the rows that ask, and never touch the neighbours' or the caller's logits."""
    logits = logits_of(len(LAWS))
    before = logits.clone()
    rows = [context(i, **params) for i, params in enumerate(LAWS.values())]
    together = process_logits(logits, rows, TokenCounts())
    for i, row in enumerate(rows):
        assert torch.equal(together[i], process_logits(logits[i : i + 1], [row], TokenCounts())[0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_have_the_law_of_their_float32_values(dtype: torch.dtype) -> None:
    logits = logits_of(1).to(dtype)
    for params in LAWS.values():
        law = process_logits(logits, [context(**params)], TokenCounts())
        assert law.dtype == torch.float32
        assert torch.equal(law, process_logits(logits.float(), [context(**params)], TokenCounts()))


def test_truncations_agree_with_transformers() -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits, history = logits_of(8, 3000), torch.tensor([TOKENS] * 8)
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(400),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.001),
        ]
    )(history, logits.clone())
    params = {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 400, "top_p": 0.95, "min_p": 0.001}
    ours = process_logits(logits, [context(i, **params) for i in range(8)], TokenCounts())
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=1e-4)
    assert torch.equal(ours.isinf(), theirs.isinf())


@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
def test_top_p_keeps_the_right_set_however_many_tokens_it_takes(spread: float) -> None:
    """Flat rows need more than the first candidates, peaked rows fewer; one batch holds both."""
    logits = torch.stack([logits_of(1, 5000)[0] * spread, logits_of(1, 5000, seed=1)[0]])
    law = process_logits(logits, [context(i, top_p=0.9) for i in range(2)])
    for row in range(2):
        want = reference_law(logits[row].tolist(), SamplingParams(top_p=0.9))
        assert abs(int((want > 0).sum()) - int(law[row].isfinite().sum())) <= 1  # float32 sums may end one later
        np.testing.assert_allclose(law[row].softmax(-1), want, atol=1e-3 / 5000)


def test_equal_logits_share_their_fate() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for params in ({"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.1}):
        kept = process_logits(logits, [context(**params)])[0].isfinite().tolist()
        assert kept == [True, True, True, True, False], params


def test_a_tiny_temperature_is_greedy_in_the_limit() -> None:
    law = process_logits(logits_of(1), [context(temperature=1e-30)])
    assert law.softmax(-1).max() == 1.0
    assert int(law.argmax()) == int(logits_of(1).argmax())


def test_plain_greedy_rows_are_not_even_copied() -> None:
    logits = logits_of(3)
    assert shape_logits(logits, [context(temperature=0.0, top_p=0.5)] * 3) is logits


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", LAWS)
def test_broken_logits_are_seen_and_stay_in_their_row(name: str, garbage: float) -> None:
    logits = logits_of(3)
    good = process_logits(logits, [context(i, **LAWS[name]) for i in range(3)], TokenCounts())
    logits[1, 6] = garbage
    law = process_logits(logits, [context(i, **LAWS[name]) for i in range(3)], TokenCounts())
    assert law[1].isnan().any()
    assert torch.equal(law[0], good[0])
    assert torch.equal(law[2], good[2])
    assert int(draw(law, torch.tensor([0.1, 0.9, 0.5])).max()) < V


# -- history --------------------------------------------------------------------------------------------------


def test_counts_grow_with_the_tokens_and_are_read_once() -> None:
    counts, seq = TokenCounts(), make_sequence(3, SamplingParams(frequency_penalty=1.0), TOKENS, prompt=PROMPT)
    for grown in ([], [7, 7], [1], [7, 0, 0]):
        seq.token_ids.extend(grown)
        generated, prompted = counts.gather([RowContext.of(seq)], torch.zeros(1, V))
        assert generated[0].tolist() == [seq.token_ids[PROMPT:].count(token) for token in range(V)]
        assert prompted[0].tolist() == [token in TOKENS[:PROMPT] for token in range(V)]
    assert len(counts) == 1
    counts.release([3, 99])
    assert len(counts) == 0


def test_a_row_counts_the_drafts_before_it() -> None:
    """B10: row j of a verify block knows drafts 0..j-1, and the next step all that were kept."""
    params, logits = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5), torch.zeros(1, V)
    seq, counts = make_sequence(0, params, TOKENS, prompt=PROMPT), TokenCounts()
    tail = torch.tensor([6, 6, 6, 99, -1])  # the last two from a broken drafter
    for j in range(6):
        shaped = shape_logits(logits, [RowContext.of(seq, offset=j, tail=tail[:j])], counts)
        assert shaped[0, 6].item() == pytest.approx(-min(j, 3) - 0.5 * (j > 0))
        assert shaped[0, 7].item() == pytest.approx(-3.5)
    seq.token_ids.extend([6, 6, 6])
    assert shape_logits(logits, [RowContext.of(seq)], counts)[0, 6].item() == pytest.approx(-3.5)


def test_min_tokens_counts_the_drafts_before_the_row() -> None:
    seq = make_sequence(0, SamplingParams(min_tokens=7), TOKENS, prompt=PROMPT, stops=STOPS)
    banned = [bool(shape_logits(torch.zeros(1, V), [RowContext.of(seq, offset=j)])[0, 4].isinf()) for j in range(4)]
    assert banned == [True, True, False, False]


# -- draws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [2, 5, 512, 513, 1000, 4096])
def test_draws_follow_the_law(vocab: int) -> None:
    """Both the one-level and the two-level search; large vocabularies are compared in 16 bins of ids."""
    size = 200_000 if vocab <= 8 else 20_000
    law = process_logits(logits_of(1, vocab), [context(temperature=1.3, top_p=0.98)])
    numbers = torch.from_numpy(uniforms(np.arange(size), 3, Stream.RECOVER))
    tokens = torch.cat([draw(law.expand(len(part), -1), part) for part in numbers.split(2_000 if vocab > 8 else size)])
    want = law[0].double().softmax(-1).numpy()
    assert (want[tokens.numpy()] > 0).all()
    bins = max(1, vocab // 16)
    grouped = np.add.reduceat(want, np.arange(0, vocab, bins))
    assert_follows(tokens // bins, grouped, distance=0.005 if vocab <= 8 else 0.02)


def test_a_bias_of_half_a_percent_would_be_seen() -> None:
    numbers = torch.from_numpy(uniforms(np.arange(400_000), 3, Stream.RECOVER))
    tokens = draw(torch.tensor([[0.605, 0.395]]).log().expand(400_000, -1), numbers)
    assert bias_of(tokens, np.array([0.605, 0.395]))[1] < 4.0
    assert bias_of(tokens, np.array([0.6, 0.4]))[1] > 4.0


def test_every_boundary_of_the_distribution_is_where_it_belongs() -> None:
    weights = torch.rand(1, 2000, generator=torch.Generator().manual_seed(1)) * (torch.arange(2000) % 3 > 0)
    cdf = weights[0].double().cumsum(-1) / weights.double().sum()
    numbers = torch.linspace(0, 1 - 2**-24, 5000)
    tokens = draw_weights(weights.expand(5000, -1), numbers)
    off = torch.where(numbers < cdf[tokens], 0.0, numbers - cdf[tokens])
    below = torch.where(tokens > 0, cdf[(tokens - 1).clamp(min=0)], 0.0)
    assert float(torch.maximum(off, below - numbers).max()) < 5e-7


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-42, 1e-30, 1e-7, 0.3, 1.0, 1e6]), min_size=1, max_size=40),
    repeat=st.integers(1, 60),
    number=st.sampled_from([0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_no_token_without_weight_is_ever_drawn(weights: list[float], repeat: int, number: float) -> None:
    """Also at both ends, for denormals, and where the product rounds up to the total (B20)."""
    row = torch.tensor([weights * repeat])
    token = int(draw_weights(row, torch.tensor([number])))
    assert 0 <= token < row.shape[1]
    assert row[0, token] > 0 or not (row > 0).any()


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30),
    top_k=st.integers(0, 35),
    top_p=st.floats(1e-3, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.sampled_from([0.0, 1e-8, 0.5, 1.0, 50.0]),
    number=st.floats(0.0, 1 - 2**-24, width=32),
)
@settings(max_examples=300, deadline=None)
def test_the_support_is_never_empty_and_draws_stay_inside(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float, number: float
) -> None:
    row = context(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    law = process_logits(torch.tensor([logits]), [row])
    assert law.max() == 0.0
    assert law[0, int(draw(law, torch.tensor([number])))].isfinite()
    if 0 < top_k < len(logits):
        edge = sorted(law[0].tolist(), reverse=True)[top_k - 1]
        assert all(value >= edge for value in law[0].tolist() if value > float("-inf"))


@pytest.mark.parametrize("vocab", [7, 512, 1000, 1024, 4096, 50257 // 16, 151936 // 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_tokens_is_the_first_arg_max(vocab: int, dtype: torch.dtype) -> None:
    logits = (logits_of(50, vocab) / 6).round().to(dtype)  # many ties
    token, value = top_tokens(logits)
    assert token.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(value, logits.amax(-1))
    logits[3, vocab // 2] = float("nan")
    assert top_tokens(logits)[1][3].isnan()


# -- seeds ----------------------------------------------------------------------------------------------------


def test_seeds_give_the_same_ids_alone_or_in_a_crowd() -> None:
    """B13 and B15."""
    logits, seqs = logits_of(8, 5000), [make_sequence(i, SamplingParams(top_p=0.95), (1, 2, 3)) for i in range(8)]
    seqs[5].seed = -7
    rows = [RowContext.of(seq) for seq in seqs]

    def draws(some: list[int]) -> list[int]:
        chosen = [rows[i] for i in some]
        law = process_logits(logits[some], chosen)
        return draw(law, row_uniforms(chosen, Stream.RECOVER, law.device)).tolist()

    crowd = draws(list(range(8)))
    assert [draws([i])[0] for i in range(8)] == crowd
    assert draws([6, 2, 5]) == [crowd[6], crowd[2], crowd[5]]
    same_row = [RowContext.of(make_sequence(i, SamplingParams(), (1, 2, 3))) for i in range(20)]
    law = process_logits(logits[:1].expand(20, -1) / 4, same_row)
    assert len(set(draw(law, row_uniforms(same_row, Stream.RECOVER, law.device)).tolist())) >= 15


# -- cache-aware sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fan_out", "c"), list(itertools.product([1, 3, 30], [1.0, 0.5, 0.05])))
def test_cache_aware_weighs_the_likeliest_tokens_by_c(fan_out: int, c: float) -> None:
    law = process_logits(logits_of(6), [context(temperature=0.9)] * 6)
    p = law.double().softmax(-1)
    edge = p.sort(-1, descending=True).values[:, min(fan_out, V - 1) :][:, :1]
    want = torch.where(p >= edge, c * p, p)
    got = cache_aware(law, fan_out, c).double().softmax(-1)
    torch.testing.assert_close(got, want / want.sum(-1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_cache_aware_sets_are_cut_by_value() -> None:
    law = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0, float("-inf")]] * 2)
    got = cache_aware(law, [1, 4], 0.5)
    assert torch.allclose(got[0, :4], law[0, :4] + np.log(0.5))
    assert got[0, 4] == -2.0
    assert torch.allclose(got[1, :5], law[1, :5] + np.log(0.5))
    assert got[:, 5].isinf().all()
