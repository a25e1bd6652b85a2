"""Whole forwards of a model: what flows between its layers, its logits, and the verifier's judgement of fixed ones.

A prompt in two chunks, then a decode step and a verify step over the cache that these left. Called by `recording`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.core.batch import Mode
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, Speculation
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.parity.numbers import integers, normal
from ssd_ascend.parity.ops import Tensors, thin
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.load import CacheSize, LoadedModel, choose_block_size, load_runner
from ssd_ascend.speculation.verifier import Verifier
from ssd_ascend.weights.loader import read_config

_PROMPT = 150
_KEPT = 4
"""Last rows of a forward that are kept."""
_LOGITS = 1024
"""Highest logits kept of a row of a large vocabulary; where they lie is kept, too."""
LOOKAHEAD = 5


def forward_steps(path: Path, backend: Backend, device: torch.device, dtype: torch.dtype) -> dict[str, Tensors]:
    """By step: the residual stream into and out of every layer, and the logits, of the last rows."""
    config = read_config(path)
    loaded = load_runner(
        path,
        backend,
        device,
        SingleRank(),
        dtype=dtype,
        block_size=choose_block_size(None, backend.capabilities),
        size=CacheSize(max_model_len=512, max_num_seqs=2, num_blocks=512 // backend.capabilities.block_sizes[0] + 2),
        capture_layers=tuple(range(config.num_layers + 1)),
    )
    ids = integers("prompt", _PROMPT + 6, low=3, high=config.vocab_size).tolist()
    table = list(range(1, -(-len(ids) // loaded.runner.block_size) + 1))
    cuts = {"prefill": (0, 100), "chunk": (100, _PROMPT), "decode": (_PROMPT, _PROMPT + 1), "verify": (_PROMPT + 1, -1)}
    found: dict[str, Tensors] = {}
    for name, (start, end) in cuts.items():
        tokens = ids[start : len(ids) if end < 0 else end]
        row = Row(tokens, start, table, min(len(tokens), _KEPT))
        found[name] = _forward(loaded, Mode.PREFILL if name in ("prefill", "chunk") else Mode(name), row)
    return found


def _forward(loaded: LoadedModel, mode: Mode, row: Row) -> Tensors:
    runner = loaded.runner
    output = runner.forward(build_batch(mode, [row], block_size=runner.block_size, device=runner.device))
    assert output.features is not None
    streams = output.features[-row.num_logits :].unflatten(-1, (-1, loaded.config.hidden_size))
    found = {f"layer {i}": thin(stream) for i, stream in enumerate(streams.unbind(1))}
    logits = output.logits[-row.num_logits :].cpu()
    step = max(1, logits.shape[-1] // _LOGITS)
    return found | {"logits": logits[:, ::step].clone()}


def verdicts(backend: Backend, device: torch.device) -> dict[str, list[list[int]]]:
    """What the verifier says of fixed logits and drafts, by kind of request: per row the tokens it emits.

    Point masses are what `ssd` and n-grams offer at temperature 0; drawn drafts bring the law they come from.
    """
    rows, vocab, k = 48, 64, LOOKAHEAD
    logits = normal("verdict logits", rows * (k + 1), vocab, scale=2.5).to(device)
    near = logits.view(rows, k + 1, vocab)[:, :k] + normal("verdict off", rows, k, vocab, scale=0.7).to(device)
    drafts = near.argmax(-1)
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "sampled": SamplingParams(temperature=0.9, seed=1),
        "truncated": SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=2),
        "penalized": SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=3),
    }
    found: dict[str, list[list[int]]] = {}
    for name, sampling in kinds.items():
        for drawn in (False, True) if sampling.temperature else (False,):
            law = torch.log_softmax(near.float() / max(sampling.temperature, 1e-3), -1) if drawn else None
            speculation = Speculation(drafts, [k] * rows, [Source.HIT] * rows, law, [drawn] * rows, [True] * rows)
            verifier = Verifier(backend.to_host)
            verdict = verifier.verify([_sequence(i, sampling) for i in range(rows)], speculation, logits)
            found[f"{name}, {'drawn drafts' if drawn else 'point masses'}"] = verdict.new_tokens
    return found


def _sequence(index: int, sampling: SamplingParams) -> Sequence:
    tokens = integers(f"history {index}", 12, low=0, high=64).tolist()
    return Sequence(
        id=index,
        token_ids=tokens,
        num_prompt_tokens=6,
        sampling=sampling,
        stop_ids=frozenset(),
        max_total_tokens=400,
        seed=1000 + index,
        arrival_s=0.0,
    )
