"""Faults that users of other engines have met: which test of ours holds each of them, and those that need an engine.

`CASES` names, for every public report we went through, the tests that would fail if we had the fault too. The reports
themselves (vLLM, SGLang, TensorRT-LLM, vllm-ascend, EAGLE, nano-vllm) are linked beside them.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.registry import DRAFTERS
from ssd_ascend.transport.messages import Answer, Message
from tests.engine.harness import drive, greedy, make_engine, prompts_of, run, speculation, write_pair
from tests.engine.lines import Edited, through
from tests.toys import (
    LLAMA3_ROPE,
    causal_lm_tensors,
    eagle3_config,
    eagle3_tensors,
    llama_config,
    qwen3_config,
    write_checkpoint,
)

CASES: dict[str, tuple[str, ...]] = {
    # a stop and the length limit in one accepted run: sgl-project/sglang#31599
    "B01": ("unit/test_text_stop.py::test_stop_and_length_are_ordered_by_token",),
    # a stop string early in a long run: sglang#23802
    "B02": ("unit/test_text_stop.py::test_result_does_not_depend_on_where_in_a_run_the_stop_lies",),
    # stop strings that straddle tokens: vllm-project/vllm#3672
    "B04": ("unit/test_text_stop.py::test_stop_that_straddles_tokens_never_leaks",),
    # drafts behind the end counted as emitted: vllm#56101
    "B06": (
        "unit/test_outputs.py::test_logprobs_sources_and_acceptance_are_cut_with_the_tokens",
        "engine/test_exactness.py::test_a_stop_token_at_every_place_of_a_run",
    ),
    # end tokens listed in generation_config.json only: vllm#4180
    "B08": (
        "unit/test_weights.py::test_all_end_of_sequence_ids_are_found",
        "serve/test_openai_client.py::test_ignore_eos",
    ),
    # penalties lost under speculation: vllm#18902; weakened by it: sglang#33643
    "B09": ("engine/test_cases.py::test_penalties_act_as_without_speculation",),
    "B10": ("engine/test_cases.py::test_penalties_act_as_without_speculation",),
    # log-probabilities of the wrong rows: vllm#34497
    "B12": ("engine/test_cases.py::test_logprobs_are_those_of_plain_decoding",),
    # a seed that does not repeat: vllm#6038; no seed that does: NVIDIA/TensorRT-LLM#19487
    "B13": ("engine/test_sampling.py::test_a_seeded_answer_is_that_of_plain_decoding",),
    "B15": ("unit/test_outputs.py::test_seeds", "serve/test_live_model.py::test_seeds"),
    # rules that are not exact: SafeAILab/EAGLE#329
    "B18": (
        "unit/test_verifier_law.py::test_the_numbers_of_b18",
        "engine/test_sampling.py::test_the_law_of_unseeded_answers",
    ),
    # no draft is ever rejected: vllm-project/vllm-ascend#13730
    "B19": ("engine/test_cases.py::test_random_drafts_are_nearly_all_refused",),
    # a token outside the support accepted by a zero: sglang#35771
    "B20": ("unit/test_verifier.py::test_a_token_outside_the_support_is_refused_even_by_a_zero",),
    # greedy answers that differ: TensorRT-LLM#8285
    "B21": ("engine/test_cases.py::test_sixty_four_greedy_answers",),
    # NaN from the draft reaches the sampler: EAGLE#75
    "B22": ("engine/test_cases.py::test_a_draft_that_computes_nonsense_for_one_row_harms_nobody",),
    # a prefix that the draft never computed: sglang#19897; off by a block: vllm#43516
    "B24": ("engine/test_exactness.py::test_a_prefix_hit_costs_no_acceptance",),
    "B25": (
        "engine/test_exactness.py::test_prefix_hits_and_chunks",
        "unit/test_blocks.py::test_a_hit_never_covers_the_last_token",
    ),
    # drafts past the last block: vllm#16370
    "B26": ("engine/test_exactness.py::test_every_prompt_length_around_block_edges",),
    # preempted, prefilled again, broken: GeeeekExplorer/nano-vllm#211
    "B28": ("engine/test_exactness.py::test_preemption_loses_nothing",),
    # what aborts leave behind: sglang#6778
    "B30": (
        "serve/test_streams.py::test_200_dropped_streams_leave_nothing",
        "engine/test_faults.py::test_aborts_and_ends_free_what_the_worker_holds",
    ),
    # prompts longer than the head's table: vllm#48894
    "B32": ("engine/test_cases.py::test_texts_longer_than_the_head_was_made_for",),
    # near max_model_len: vllm#49027
    "B33": ("engine/test_exactness.py::test_the_end_of_the_model",),
    # empty prompts, and those at the limit: vllm#7632
    "B34": ("engine/test_cases.py::test_prompts_at_and_beyond_the_limits",),
    # capture layers guessed in silence: vllm#50170; maps of draft ids: EAGLE#222
    "B35": ("engine/test_eagle3_head.py::test_capture_layers_are_guessed_aloud_and_can_be_overruled",),
    "B36": ("engine/test_eagle3_head.py::test_d2t",),
    # one rotary table for two models: vllm-ascend#6612
    "B38": (
        "engine/test_cases.py::test_a_draft_rotates_in_its_own_way",
        "engine/test_architectures.py::test_inverse_frequencies_equal_transformers",
    ),
    # live batch and captured batch differ: vllm#43682
    "B39": (
        "engine/test_cases.py::test_any_number_of_streams",
        "unit/test_graphs.py::test_what_fits_no_bucket_runs_eagerly",
    ),
    # prompts shorter than a draft, and a rank that dies: vllm-ascend#5583, #8402
    "B40": (
        "engine/test_exactness.py::test_every_prompt_length_around_block_edges",
        "serve/test_life.py::test_engine_death_without_another",
    ),
}
PENALTIES: list[dict[str, float]] = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("case", CASES)
def test_the_table_names_tests_that_exist(case: str) -> None:
    root = Path(__file__).resolve().parents[1]
    for test in CASES[case]:
        file, name = test.split("::")
        assert re.search(rf"^ *def {name}\(", (root / file).read_text(encoding="utf-8"), re.MULTILINE), test


@pytest.mark.parametrize("speculator", ["sd", "ssd"])
@pytest.mark.parametrize("drafter", DRAFTERS.names())
def test_penalties_act_as_without_speculation(pair: Path, speculator: str, drafter: str) -> None:
    """B09, B10: greedy, so that every accepted token shows; the target drafts for itself, so that runs are long."""
    prompts = prompts_of([9, 20, 5])
    own = {"draft": str(pair / "target")} if drafter == "model" else {}
    answers = []
    for options in PENALTIES:
        plain = run(pair, prompts, greedy(40, **options))
        other = run(pair, prompts, greedy(40, **options), speculation(pair, speculator, drafter, **own))
        assert other.tokens == plain.tokens
        answers.append(plain.tokens)
        if drafter == "model":
            assert other.stats.speculation.accepted > 40
    assert answers[0] != answers[1]


@pytest.mark.parametrize("speculator", ["sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_those_of_plain_decoding(pair: Path, speculator: str, temperature: float) -> None:
    """B12: for every token, while drafts are accepted."""
    prompts = prompts_of([9, 20, 5])
    sampling = SamplingParams(
        temperature=temperature, seed=3, reproducible=True, max_tokens=40, ignore_eos=True, logprobs=5
    )
    plain = run(pair, prompts, sampling)
    other = run(pair, prompts, sampling, speculation(pair, speculator))
    assert other.tokens == plain.tokens
    assert other.stats.speculation.accepted > 0
    for ours, theirs in zip(other.deltas, plain.deltas, strict=True):
        own = [entry for delta in ours for entry in delta.logprobs or []]
        expected = [entry for delta in theirs for entry in delta.logprobs or []]
        assert len(own) == 40
        assert [(e.token, e.rank, [t for t, _ in e.top]) for e in own] == [
            (e.token, e.rank, [t for t, _ in e.top]) for e in expected
        ]
        torch.testing.assert_close(
            torch.tensor([e.logprob for e in own]), torch.tensor([e.logprob for e in expected]), atol=1e-4, rtol=0
        )


def test_random_drafts_are_nearly_all_refused(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B19: with a uniform draft over 24 tokens about one in 24 stands, never all of them."""
    generator = torch.Generator().manual_seed(5)

    def scramble(message: Message) -> Message:
        assert isinstance(message, Answer)
        drafts = [torch.randint(0, 24, (len(row),), generator=generator).tolist() for row in message.drafts]
        return dataclasses.replace(message, drafts=drafts, has_law=[False] * len(message.seq_ids), law=None)

    through(monkeypatch, lambda line: Edited(line, scramble))
    sampling = [SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=i) for i in range(8)]
    stats = run(pair, prompts_of([5] * 8), sampling, speculation(pair, "ssd")).stats.speculation
    judged = sum(stats.drafted_per_position[:1])
    assert judged > 200
    assert 0.0 < stats.accepted_per_position[0] / judged < 0.12


@pytest.mark.slow
@pytest.mark.parametrize("speculator", ["sd", "ssd"])
@pytest.mark.parametrize("drafter", DRAFTERS.names())
def test_sixty_four_greedy_answers(pair: Path, speculator: str, drafter: str) -> None:
    """B21: 64 prompts, 256 tokens each, float32: identical."""
    prompts = prompts_of([1 + 7 * i % 61 for i in range(64)], seed=21)
    room = {"max_num_seqs": 16, "num_kv_blocks": 512}
    plain = run(pair, prompts, greedy(256), **room)
    assert run(pair, prompts, greedy(256), speculation(pair, speculator, drafter), **room).tokens == plain.tokens


@pytest.mark.parametrize("speculator", ["sd", "ssd"])
@pytest.mark.parametrize("drafter", ["model", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_that_computes_nonsense_for_one_row_harms_nobody(
    pair: Path, monkeypatch: pytest.MonkeyPatch, speculator: str, drafter: str, temperature: float
) -> None:
    """B22: NaN in one row of every draft forward: answers and vocabulary are what they were."""
    runners: list[ModelRunner] = []
    build, own = PagedDrafter.__init__, ModelRunner.forward

    def remember(self: PagedDrafter, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        build(self, runner, *args, **kwargs)
        runners.append(runner)

    def forward(self: ModelRunner, batch: ForwardBatch) -> ModelOutput:
        output = own(self, batch)
        if self in runners and output.logits.shape[0]:
            output.logits[0] = float("nan")
        return output

    monkeypatch.setattr(PagedDrafter, "__init__", remember)
    monkeypatch.setattr(ModelRunner, "forward", forward)
    prompts = prompts_of([9, 20, 5])
    sampling = SamplingParams(temperature=temperature, seed=3, reproducible=True, max_tokens=24, ignore_eos=True)
    plain = run(pair, prompts, sampling)
    other = run(pair, prompts, sampling, speculation(pair, speculator, drafter))
    assert runners
    assert other.tokens == plain.tokens
    assert other.stats.speculation.worker_alive
    loose = dataclasses.replace(sampling, reproducible=False)
    sampled = run(pair, prompts, loose, speculation(pair, speculator, drafter))
    assert [len(tokens) for tokens in sampled.tokens] == [24] * 3
    assert {token for tokens in sampled.tokens for token in tokens} <= set(range(24))


@pytest.mark.parametrize("speculator", ["sd", "ssd"])
def test_texts_longer_than_the_head_was_made_for(pair: Path, tmp_path: Path, speculator: str) -> None:
    """B32: its config says 32 positions; its table reaches as far as the target does, and so do its drafts."""
    target = llama_config(vocab_size=24, eos_token_id=2, max_position_embeddings=512)
    config = eagle3_config(target, max_position_embeddings=32)
    head = write_checkpoint(tmp_path / "head", config, eagle3_tensors(config, target))
    prompts = prompts_of([30, 31, 32, 33, 100])
    plain = run(pair, prompts, greedy())
    other = run(pair, prompts, greedy(), speculation(pair, speculator, "eagle3", draft=str(head)))
    assert other.tokens == plain.tokens
    long = other.last[4].stats
    assert long is not None
    assert long.drafted > 0


def test_prompts_at_and_beyond_the_limits(pair: Path) -> None:
    """B34: refused by name, and the next request is answered; the longest that fits is."""
    engine = make_engine(pair, speculation(pair, "ssd"), max_model_len=64)
    for length, max_tokens in ((0, 4), (64, 1), (65, 1), (60, 5)):
        with pytest.raises(RequestError):
            engine.submit(EngineRequest(id=99, prompt_token_ids=[3] * length, sampling=greedy(max_tokens)))
    assert len(drive(engine, prompts_of([63]), greedy(1)).tokens[0]) == 1
    engine.close()


@pytest.mark.parametrize("speculator", ["sd", "ssd"])
def test_a_draft_rotates_in_its_own_way(tmp_path: Path, speculator: str) -> None:
    """B38: scaled rotation in the target, another theta in the draft; the draft is smaller, too."""
    shared = {"vocab_size": 24, "eos_token_id": 2, "max_position_embeddings": 512}
    target = llama_config(**shared, rope_theta=1e6, rope_scaling=LLAMA3_ROPE)
    draft = qwen3_config(**shared, rope_theta=1e4, hidden_size=16, num_hidden_layers=2)
    write_checkpoint(tmp_path / "target", target)
    write_checkpoint(tmp_path / "model", draft, causal_lm_tensors(draft, seed=4))
    prompts = prompts_of([9, 40, 17])
    plain = run(tmp_path, prompts, greedy(40))
    engine = make_engine(tmp_path, speculation(tmp_path, speculator))
    other = drive(engine, prompts, greedy(40))
    assert other.tokens == plain.tokens
    assert other.stats.speculation.drafted > 0
    engine.close()


def test_vocabularies_that_differ_are_refused_with_both_sizes(tmp_path: Path) -> None:
    write_pair(tmp_path, "llama")
    write_checkpoint(tmp_path / "other", llama_config(vocab_size=40))
    with pytest.raises(ConfigError, match=r"40 tokens.*24"):
        make_engine(tmp_path, speculation(tmp_path, "sd", draft=str(tmp_path / "other")))


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 7, 8, 9])
def test_any_number_of_streams(pair: Path, streams: int) -> None:
    """B39: up to one more than run at once; lengths differ, so that the batch shrinks by ones."""
    prompts = prompts_of([3 + 5 * i for i in range(streams)])
    sampling = [greedy(10 + 3 * i) for i in range(streams)]
    plain = run(pair, prompts, sampling)
    for drafter in ("model", "eagle3"):
        assert run(pair, prompts, sampling, speculation(pair, "ssd", drafter)).tokens == plain.tokens
