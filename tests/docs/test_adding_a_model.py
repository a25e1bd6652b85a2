"""`docs/adding-a-model.md` is true: its code is the code, and every mistake it lists gets the message it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.config.preset import load_preset
from ssd_ascend.errors import ConfigError
from ssd_ascend.speculation.drafters.model import capture_layers
from ssd_ascend.weights.loader import load_model, read_config
from tests.toys import build_context, causal_lm_tensors, llama_config, qwen2_config, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
CONFIG = qwen2_config(num_hidden_layers=1)


def load(folder: Path) -> None:
    load_model(folder, build_context(read_config(folder)), max_positions=32)


def checkpoint(folder: Path, config: dict[str, Any], **changed: torch.Tensor | None) -> None:
    """A checkpoint, less the tensors that are None, plus the others. Dots are written as `__`."""
    tensors = causal_lm_tensors(CONFIG)
    for name, tensor in changed.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    write_checkpoint(folder, config, tensors)
    load(folder)


def family_without_a_line(folder: Path) -> None:
    write_checkpoint(folder, CONFIG | {"model_type": "qwen4"}, causal_lm_tensors(CONFIG))
    load(folder)


def biases_forgotten(folder: Path) -> None:
    checkpoint(folder, CONFIG | {"model_type": "llama"})


def bias_too_many(folder: Path) -> None:
    checkpoint(folder, CONFIG, model__layers__0__self_attn__q_proj__bias=None)


def head_untied(folder: Path) -> None:
    checkpoint(folder, CONFIG, lm_head__weight=None)


def head_dim_wrong(folder: Path) -> None:
    checkpoint(folder, CONFIG | {"head_dim": 16})


def activation(folder: Path) -> None:
    checkpoint(folder, CONFIG | {"hidden_act": "gelu"})


def rope(folder: Path) -> None:
    checkpoint(folder, CONFIG | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}})


def window(folder: Path) -> None:
    checkpoint(folder, CONFIG | {"use_sliding_window": True})


def quantised(folder: Path) -> None:
    checkpoint(folder, CONFIG | {"quantization_config": {"quant_method": "awq"}})


def incomplete_preset(folder: Path) -> None:
    text = (ROOT / "models" / "qwen2.5-1.5b-draft-0.5b.toml").read_text()
    (folder / "x.toml").write_text("\n".join(line for line in text.splitlines() if not line.startswith("hit_rate ")))
    load_preset(folder / "x.toml")


def draft_of_another_vocabulary(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(llama_config(vocab_size=95)))
    write_checkpoint(folder / "target", CONFIG)
    capture_layers(folder, read_config(folder / "target"))


MISTAKES: list[Callable[[Path], None]] = [
    family_without_a_line, biases_forgotten, bias_too_many, head_untied, head_dim_wrong, activation, rope, window,
    quantised, incomplete_preset, draft_of_another_vocabulary,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_gets_the_message_in_the_list(mistake: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        mistake(tmp_path)
    said = str(raised.value).replace(str(tmp_path), "DIR")
    assert f"`{said}`" in DOC, said


def test_the_list_has_no_message_that_nothing_gives() -> None:
    section = DOC.partition("## Usual mistakes")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(MISTAKES)


def test_its_code_is_the_code() -> None:
    blocks = [block.partition("```")[0] for block in DOC.split("```python\n")[1:]]
    source = (ROOT / "ssd_ascend" / "architectures" / "qwen2.py").read_text()
    source += (ROOT / "ssd_ascend" / "architectures" / "registry.py").read_text()
    source += (ROOT / "tests" / "engine" / "harness.py").read_text()
    source += (ROOT / "tests" / "engine" / "test_architectures.py").read_text()
    lines = [line for block in blocks for line in block.splitlines() if line.strip() not in ("", "...")]
    assert len(lines) > 10
    assert [line for line in lines if line not in source] == []


def test_the_family_it_adds_is_served() -> None:
    assert "qwen2" in ARCHITECTURES
