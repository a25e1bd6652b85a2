"""Strict loading: what is missing, superfluous, misshapen, cut off or astray is said in one sentence that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.errors import ConfigError
from ssd_ascend.weights.loader import load_model, read_config
from tests.toys import Tensors, build_context, causal_lm_tensors, llama_config, prefill_batch, run, write_checkpoint

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
CONFIG = llama_config(num_hidden_layers=2)


def load(path: Path, **options: Any) -> ModelOutput:
    config = read_config(path)
    ctx = build_context(config, dtype=options.pop("dtype", torch.float32))
    model, _ = load_model(path, ctx, max_positions=32, **options)
    return run(model, ctx, config.num_layers, prefill_batch(IDS))


def complaint(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.remedy
    return str(caught.value)


def tensors_with(**changes: torch.Tensor | None) -> Tensors:
    """The toy's tensors; `a__b=None` removes tensor a.b."""
    tensors = causal_lm_tensors(CONFIG)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    return tensors


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    whole = load(write_checkpoint(tmp_path / "whole", CONFIG))
    sharded = load(write_checkpoint(tmp_path / "sharded", CONFIG, shards=3))
    assert torch.equal(whole.logits, sharded.logits)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "missing weights file" in complaint(tmp_path)
    assert "model-00002-of-00003.safetensors" in complaint(tmp_path)


def test_files_beside_the_index_are_not_read(tmp_path: Path) -> None:
    expected = load(write_checkpoint(tmp_path, CONFIG, shards=2))
    save_file({"model.norm.weight": torch.full((32,), 9.0)}, tmp_path / "consolidated.safetensors")
    save_file({"model.norm.weight": torch.full((32,), 9.0)}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).logits, expected.logits)


def test_stray_tensors_inside_a_shard_are_not_read(tmp_path: Path) -> None:
    expected = load(write_checkpoint(tmp_path, CONFIG, shards=2))
    index = tmp_path / "model.safetensors.index.json"
    home = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    names = [name for name, file in json.loads(index.read_text())["weight_map"].items() if file == home]
    tensors = causal_lm_tensors(CONFIG)
    save_file({**{name: tensors[name] for name in names}, "stray": torch.ones(3)}, tmp_path / home)
    assert torch.equal(load(tmp_path).logits, expected.logits)


def test_an_index_that_lies_or_leads_elsewhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    honest = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**honest, "ghost": next(iter(honest.values()))}}))
    assert "has no tensor 'ghost'" in complaint(tmp_path)
    index.write_text(json.dumps({"weight_map": {**honest, "ghost": "../other.safetensors"}}))
    assert "'../other.safetensors'" in complaint(tmp_path)
    index.write_text("{")
    assert "not a readable index" in complaint(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 200, 20000])
def test_a_truncated_file_is_named(kept: int, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, CONFIG) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file} is not a complete safetensors file" in complaint(tmp_path)


def test_a_file_whose_numbers_are_a_hole_is_named(tmp_path: Path) -> None:
    """A download that was broken off, or never begun, may have left the size, and zeros."""
    file = write_checkpoint(tmp_path, CONFIG) / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    with file.open("r+b") as opened:
        opened.truncate(header)
        opened.truncate(len(whole))
    assert "is all zeros, and of" in complaint(tmp_path)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in causal_lm_tensors(CONFIG).items()}
    load(write_checkpoint(tmp_path / "written", CONFIG, tensors))  # zeros that somebody wrote are somebody's business


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, tensors_with(model__layers__1__self_attn__k_proj__weight=None))
    assert "lacks tensor 'model.layers.1.self_attn.k_proj.weight'" in complaint(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**CONFIG, "num_hidden_layers": 3}, causal_lm_tensors(CONFIG))
    assert "lacks 9 tensors: 'model.layers.2." in complaint(tmp_path)
    assert complaint(tmp_path).count("model.layers.2.") == 3


def test_an_untied_model_must_bring_a_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, tensors_with(lm_head__weight=None))
    assert "lacks tensor 'lm_head.weight'" in complaint(tmp_path)


def test_a_tied_model_may_bring_one(tmp_path: Path) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    with_copy = load(write_checkpoint(tmp_path / "with", tied, tensors_with()))
    without = load(write_checkpoint(tmp_path / "without", tied, tensors_with(lm_head__weight=None)))
    assert torch.equal(with_copy.logits, without.logits)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    bias = torch.zeros(32)
    write_checkpoint(tmp_path, CONFIG, tensors_with(model__layers__0__self_attn__q_proj__bias=bias))
    assert "holds tensor 'model.layers.0.self_attn.q_proj.bias'" in complaint(tmp_path)


def test_rotary_frequencies_of_old_exporters_are_not_unexpected(tmp_path: Path) -> None:
    old = tensors_with(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert load(write_checkpoint(tmp_path, CONFIG, old)).logits.shape == (8, 96)


@pytest.mark.parametrize("shape", [(31, 32), (32, 16), (32,)])
def test_a_wrong_shape_is_named_with_both(shape: tuple[int, ...], tmp_path: Path) -> None:
    wrong = tensors_with(model__layers__0__self_attn__q_proj__weight=torch.zeros(shape))
    said = complaint(write_checkpoint(tmp_path, CONFIG, wrong))
    assert f"'model.layers.0.self_attn.q_proj.weight' has shape {list(shape)}, expected [32, 32]" in said
    assert "model.safetensors" in said


def test_quantised_weights_are_not_taken_for_numbers(tmp_path: Path) -> None:
    packed = tensors_with(model__layers__0__self_attn__q_proj__weight=torch.ones(32, 32, dtype=torch.int8))
    assert "'model.layers.0.self_attn.q_proj.weight' holds int8" in complaint(
        write_checkpoint(tmp_path, CONFIG, packed)
    )


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(causal_lm_tensors(CONFIG), tmp_path / "pytorch_model.bin")
    assert "missing weights file" in complaint(tmp_path)
    assert "model.safetensors" in complaint(tmp_path)


def test_weights_are_cast_to_the_serving_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, dtype=torch.float16)
    full, half = load(tmp_path), load(tmp_path, dtype=torch.bfloat16)
    assert half.hidden.dtype == torch.bfloat16
    torch.testing.assert_close(half.logits.float(), full.logits, atol=0.3, rtol=0.1)


def test_a_model_outlives_its_files(tmp_path: Path) -> None:
    """Nothing loaded may be a view of a mapped file: overwriting a checkpoint must not change a running server."""
    config = read_config(write_checkpoint(tmp_path, CONFIG))
    ctx = build_context(config)
    model, _ = load_model(tmp_path, ctx, max_positions=32)
    before = run(model, ctx, 2, prefill_batch(IDS)).logits
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as out:
        out.write(b"\0" * file.stat().st_size)
    assert torch.equal(run(model, ctx, 2, prefill_batch(IDS)).logits, before)


def test_progress_runs_from_something_to_everything(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(write_checkpoint(tmp_path, CONFIG, shards=2), progress=lambda done, total: seen.append((done, total)))
    size = sum(tensor.nbytes for tensor in causal_lm_tensors(CONFIG).values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (size, size)


def test_a_model_without_weights_says_so() -> None:
    from ssd_ascend.architectures.registry import ARCHITECTURES
    from ssd_ascend.config.model import model_config_from_hf

    config = model_config_from_hf(CONFIG, where="x")
    ctx = build_context(config)
    model = ARCHITECTURES.get("llama")(config, ctx, max_positions=32)
    with pytest.raises(RuntimeError, match="load the model"):
        model.lm_head(torch.zeros(1, 32))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no config.json"),
        ("{", "is not readable JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "has no 'model_type'"),
        ('{"model_type": "lama"}', "unknown model family 'lama'"),
    ],
)
def test_configs_that_cannot_be_read(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert said in complaint(tmp_path)
    assert str(tmp_path) in complaint(tmp_path)


def test_an_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    said = complaint(tmp_path)
    assert f"known: {', '.join(ARCHITECTURES)}" in said
    assert "did you mean 'llama'?" in said


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    assert "no such model" in complaint(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "neither a directory nor a .gguf" in complaint(tmp_path / "model.safetensors")


def test_all_end_of_sequence_ids_are_found(tmp_path: Path) -> None:
    """B08: chat models list the end of a turn in generation_config.json only."""
    write_checkpoint(tmp_path, {**CONFIG, "eos_token_id": 2})
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7, 8]}')
    assert read_config(tmp_path).eos_token_ids == (2, 7, 8)


def test_a_file_that_cannot_be_mapped_says_what_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_checkpoint(tmp_path, CONFIG) / "model.safetensors"

    def refused(path: Path, framework: str) -> None:
        raise RuntimeError(f"unable to mmap 61066786840 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr("ssd_ascend.weights.safetensors.safe_open", refused)
    assert f"cannot map {file}: unable to mmap" in complaint(tmp_path)
