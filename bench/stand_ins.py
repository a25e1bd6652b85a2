"""`bench.py --synthetic`: models of a preset's shapes where its weights cannot be had, for as long as a run lasts.

Speed does not depend on the weights' values; how often drafts are kept does, so that is set (`bench/agreement.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.agreement import CORE, Agreement
from bench.checkpoints import environment, hooked, install, lay_out_draft, lay_out_model
from bench.shapes import eagle3_shape
from ssd_ascend import catalogue
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.preset import Dims, ModelPreset
from ssd_ascend.errors import ConfigError

_NOISE = 0.1
_PLAIN_NOTICE = "synthetic weights, and random tokens as prompts"
_NOTICE = _PLAIN_NOTICE + "; {accepted:.0%} of drafts kept, {foreseen:.0%} of other outcomes foreseen: set, not learnt"
ACCEPTED, FORESEEN = 0.8, 0.85


@contextlib.contextmanager
def stand_ins(args: argparse.Namespace) -> Iterator[str]:
    """Let `args` name laid-out checkpoints instead of the preset it names; yields what the reader must be told."""
    given = vars(args)
    name = given.get("model")
    if name is None or not catalogue.is_preset(name):
        raise ConfigError(f"--synthetic needs a preset, not {name!r}", remedy="give --model NAME of models/")
    expected = catalogue.find_preset(name).expected
    usual = {"accepted": expected.acceptance.value if expected else ACCEPTED, "foreseen": FORESEEN}
    shares = {key: given.get(key, default) for key, default in usual.items()}
    install()
    with tempfile.TemporaryDirectory() as folder, environment(hooked(Path(folder) / "hook")):
        drafts = _lay_out(given, name, Path(folder), shares)
        given["random"] = True  # there is no tokenizer, and nothing to read in the answers
        yield _NOTICE.format(**shares) if drafts else _PLAIN_NOTICE


def _lay_out(given: dict[str, Any], name: str, folder: Path, shares: dict[str, float]) -> bool:
    """Write the checkpoints and name them in `given`; whether there is a draft whose agreement was set."""
    preset = catalogue.find_preset(name)
    kind = load_backend(given.get("device")).name
    data = _config(preset.target)
    core = min(CORE, eagle3_shape(data)["draft_vocab_size"])  # so that a head, too, can follow the chain
    agreement = Agreement(**shares, core=core)
    place = folder / Path(name).name.removesuffix(".toml")
    target = lay_out_model(place, data, device_type=kind, seed=1, noise=_NOISE, core=core)
    given["model"] = str(target)
    if preset.draft is None or preset.speculation is None:
        if given.get("draft") == name:  # it drafts for itself
            given["draft"] = str(target)
        return False
    for key in ("drafter", "lookahead", "fan_out"):  # a folder brings none of the preset's settings along
        given.setdefault(key, getattr(preset.speculation, key))
    draft = folder / "draft"
    if given["drafter"] not in ("eagle3", "model"):
        return False
    own = None if given["drafter"] == "eagle3" else _config(preset.draft)
    given["draft"] = str(lay_out_draft(draft, target, own, device_type=kind, agreement=agreement, noise=_NOISE))
    return True


def _config(model: ModelPreset) -> dict[str, Any]:
    """A `config.json` of the preset's sizes."""
    dims: Dims = model.dims
    experts = {
        "num_experts": dims.num_experts,
        "num_experts_per_tok": dims.experts_per_token,
        "moe_intermediate_size": dims.expert_size,
        "norm_topk_prob": True,
    }
    return {
        **(experts if dims.num_experts else {}),
        "model_type": model.family,
        "hidden_size": dims.hidden_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "intermediate_size": dims.intermediate_size,
        "vocab_size": dims.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": dims.max_model_len or 8192,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
