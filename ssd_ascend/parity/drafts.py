"""What drafters think of fixed drafts after a fixed history: the scores they fork from, and the features they recycle.

A drafter's `glue` is one forward over given tokens, so nothing hangs on a draw before it. Called by `recording`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.parity.numbers import integers, normal
from ssd_ascend.parity.ops import Tensors
from ssd_ascend.speculation.base import DraftSequence
from ssd_ascend.speculation.registry import DRAFTERS
from ssd_ascend.speculation.setup import DraftSetup, TargetFacts
from ssd_ascend.weights.loader import read_config

_HISTORY, _LOOKAHEAD, _ROUNDS = 24, 4, 3
_KEPT = 1024


def draft_views(target: str, drafter: str, draft: str, backend: Backend, device: torch.device, dtype: str) -> Tensors:
    """A few rounds: each commits some tokens, then glues over drafts. Scores [R, V], hidden [R, H] where there is."""
    config = read_config(Path(target))
    kind = DRAFTERS.get(drafter)
    width = len(kind.capture_layers(Path(draft), config)) * config.hidden_size
    facts = TargetFacts(
        path=target,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        max_model_len=256,
        max_num_seqs=1,
        max_batched_tokens=256,
        feature_width=width,
        kv_tokens=512,
        dtype=dtype,
    )
    speculation = SpeculationConfig(speculator="ssd", drafter=drafter, draft=draft, lookahead=_LOOKAHEAD)
    setup = DraftSetup(backend=backend, device=device, config=speculation, target=facts, path=Path(draft), width=1)
    built = kind.build(setup)
    tokens = integers("draft history", _HISTORY + _ROUNDS * (_LOOKAHEAD + 2), low=3, high=config.vocab_size).tolist()
    features = normal("draft features", len(tokens), width) if width else None
    seq = DraftSequence(0, [], _HISTORY, SamplingParams(temperature=0.0), 0, frozenset())
    found: Tensors = {}
    for turn in range(_ROUNDS):
        end = _HISTORY + turn * 2
        seq.token_ids = tokens[:end]
        if features is not None:
            seq.features = features[seq.features_start : end - 1]
        sent = tokens[end : end + _LOOKAHEAD] if drafter == "model" else []  # drafts of a head bring its own features
        glue = built.glue([seq], [sent], [None])
        found[f"scores {turn}"] = glue.scores[:, :: max(1, glue.scores.shape[1] // _KEPT)].cpu().clone()
        if glue.hidden is not None:
            found[f"hidden {turn}"] = glue.hidden.cpu().clone()  # both may lie where the next round writes
    return found
