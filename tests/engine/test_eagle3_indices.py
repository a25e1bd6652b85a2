"""EAGLE-3 in `ssd`: every logit equals an independent head's on the same (token, feature, position) triples.

The drafter's calls and all forwards below them are recorded in a run of a whole engine. Afterwards rows of logits are
computed again, dense and alone, from what the index conventions say that they stand on: committed tokens with the
target's features of the position before, drafts under verification with the features they were drafted from, a guess
with the feature of the row that foresaw it, and from there on the head's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.speculation.base import Chain, Glue
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.weights.eagle3 import read_eagle3_config
from ssd_ascend.weights.loader import load_model, read_config
from tests.engine.eagle3_reference import Dialect, Tensors, combine, head_forward
from tests.engine.harness import DEVICE, DTYPE, drive, greedy, make_engine, prompts_of, speculation
from tests.engine.lines import worker_of
from tests.toys import build_context, prefill_batch
from tests.toys import run as forward

THETA = {"llama": 1e4, "qwen3": 1e6}
PROMPTS = prompts_of([1, 2, 17, 33, 16])
SOME_CALLS, SOME_ROWS = 40, 5
"""Calls looked at, and every so many of a call's branches: the reference is slow."""


@dataclass
class Call:
    """One call of the drafter: what it was asked, the logits of its forwards, and what it gave back."""

    kind: str
    seq_ids: list[int]
    committed: list[list[int]]
    sent: list[tuple[int, ...]]
    hidden: list[torch.Tensor | None]
    depths: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    result: Any = None


class Recorder:
    """Wraps the methods of one drafter and its runner."""

    def __init__(self, drafter: PagedDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self._runner = drafter.runner
        self._open: Call | None = None
        self._glue: Call | None = None
        own_forward = ModelRunner.forward

        def recording(runner: ModelRunner, batch: ForwardBatch) -> ModelOutput:
            output = own_forward(runner, batch)
            if runner is self._runner and self._open is not None and output.logits.shape[0]:
                self._open.logits.append(output.logits.clone())
            return output

        monkeypatch.setattr(ModelRunner, "forward", recording)
        for name, describe in (("chain", self._chain), ("glue", self._of_glue), ("branch", self._branch)):
            monkeypatch.setattr(drafter, name, self._wrap(getattr(drafter, name), describe))

    def _wrap(self, own: Callable[..., Any], describe: Callable[..., Call]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._open = describe(*args)
            self.calls.append(self._open)
            self._open.result = own(*args)
            self._open = None
            return self.calls[-1].result

        return call

    def _chain(self, seqs: Any, lookahead: int) -> Call:
        return Call(
            "chain", [s.id for s in seqs], [list(s.token_ids) for s in seqs], [()] * len(seqs), [None] * len(seqs)
        )

    def _of_glue(self, seqs: Any, sent: Any, hidden: Any) -> Call:
        ids, committed = [s.id for s in seqs], [list(s.token_ids) for s in seqs]
        self._glue = Call("glue", ids, committed, [tuple(drafts) for drafts in sent], list(hidden))
        return self._glue

    def _branch(self, branches: Any, guesses: Any, glue: Any, sent: Any, k: int, should_stop: Any) -> Call:
        assert self._glue is not None
        under = dict(zip(self._glue.seq_ids, self._glue.hidden, strict=True))
        return Call(
            "branch",
            [b.seq.id for b in branches],
            [list(b.seq.token_ids) for b in branches],
            [tuple(drafts) for drafts in sent],
            [under[b.seq.id] for b in branches],
            [b.depth for b in branches],
            guesses.tolist(),
        )


class Reference:
    """The same numbers from the tensors on disk, without cache, batch or branch."""

    def __init__(self, pair: Path, family: str, texts: dict[int, list[int]]) -> None:
        self._dialect = Dialect(theta=THETA[family])
        self._w: Tensors = load_file(pair / "eagle3" / "model.safetensors")
        self._w["embed_tokens.weight"] = load_file(pair / "target" / "model.safetensors")["model.embed_tokens.weight"]
        config = read_config(pair / "target")
        capture = read_eagle3_config(pair / "eagle3", config).capture_layers
        ctx = build_context(config)
        model, _ = load_model(pair / "target", ctx, max_positions=512, capture_layers=capture)
        self._features = {}
        for seq_id, text in texts.items():
            features = forward(model, ctx, config.num_layers, prefill_batch(text)).features
            assert features is not None
            self._features[seq_id] = combine(self._w, features, self._dialect.eps)

    def run(
        self, seq_id: int, committed: list[int], tail: list[tuple[int, torch.Tensor | None]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of the entries of `committed`, then of `tail`: tokens with a feature (None: own)."""
        tokens = committed[1:]
        features = self._features[seq_id][: len(committed) - 1]
        logits, own = self._head(tokens, features)
        for token, feature in tail:
            tokens = [*tokens, token]
            features = torch.cat((features, (own[-1] if feature is None else feature)[None]))
            logits, own = self._head(tokens, features)
        return logits, own

    def _head(self, tokens: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return head_forward(self._w, torch.tensor(tokens), features, self._dialect)


ROUNDING = {"float32": 0.0, "float16": 0.03, "bfloat16": 0.2}
"""Of the largest number, after the several forwards behind it; rows that stand on another triple differ by units."""


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    atol = max(2e-4, ROUNDING[DTYPE] * theirs.abs().max().item())
    torch.testing.assert_close(ours.float().cpu(), theirs, atol=atol, rtol=0)


def paired(drafts: tuple[int, ...], hidden: torch.Tensor | None) -> list[tuple[int, torch.Tensor | None]]:
    assert not drafts or hidden is not None
    return [(token, hidden[j].float().cpu()) for j, token in enumerate(drafts)] if hidden is not None else []


def check_chain(call: Call, reference: Reference, seen: Counter[str]) -> None:
    """Row i of step m: everything committed, and the m tokens drafted so far, on the head's own features."""
    chain: Chain = call.result
    live = [i for i, count in enumerate(chain.num_tokens) if count]
    for at, i in enumerate(live):
        drafted = chain.tokens[i].tolist()
        assert chain.hidden is not None
        expected, own = reference.run(call.seq_ids[i], call.committed[i], [(t, None) for t in drafted[:-1]])
        first = len(call.committed[i]) - 2
        for step, logits in enumerate(call.logits):
            close(logits[at], expected[first + step])
            close(chain.hidden[i, step], own[first + step])
            seen["first step" if step == 0 else "chain"] += 1


def check_glue(call: Call, reference: Reference, seen: Counter[str]) -> None:
    """Row j: everything committed, and j drafts on the features they came with. One forward for all."""
    glue: Glue = call.result
    row = 0
    for i, num_rows in enumerate(glue.num_rows):
        if not num_rows:
            continue
        tail = paired(call.sent[i], call.hidden[i])
        expected, own = reference.run(call.seq_ids[i], call.committed[i], tail)
        for j in range(num_rows):
            close(call.logits[0][row + j], expected[len(call.committed[i]) - 2 + j])
            assert glue.hidden is not None
            close(glue.hidden[row + j], own[len(call.committed[i]) - 2 + j])
            seen[f"glue {j}"] += 1
        row += num_rows


def check_branch(call: Call, reference: Reference, seen: Counter[str]) -> None:
    """Branch b of step m: everything committed, the drafts its outcome accepts, the guess, and m tokens after it."""
    chain: Chain = call.result
    assert chain.hidden is not None
    for b in range(seen["branch"] % SOME_ROWS, len(call.depths), SOME_ROWS):
        depth = call.depths[b]
        tail = paired(call.sent[b], call.hidden[b])[:depth]
        after = [call.guesses[b], *chain.tokens[b].tolist()[:-1]]
        expected, own = reference.run(call.seq_ids[b], call.committed[b], tail + [(token, None) for token in after])
        first = len(call.committed[b]) - 1 + depth
        for step, logits in enumerate(call.logits):
            close(logits[b], expected[first + step])
            close(chain.hidden[b, step], own[first + step])
            seen[f"fork {depth}" if step == 0 else "branch"] += 1


def check_provenance(calls: list[Call], seen: Counter[str]) -> None:
    """The features that glue gets with drafts are those of the branch or chain that drafted them."""
    made: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}
    length: dict[int, int] = {}
    for call in calls:
        if call.kind == "glue":
            for seq_id, committed, sent, hidden in zip(
                call.seq_ids, call.committed, call.sent, call.hidden, strict=True
            ):
                seen["extend"] += len(committed) - length.get(seq_id, len(committed)) > 1
                length[seq_id] = len(committed)
                if sent:
                    assert hidden is not None
                    assert any(torch.equal(hidden, own) for own in made[seq_id, sent])
            continue
        for i, seq_id in enumerate(call.seq_ids):
            count = call.result.num_tokens[i]
            tokens = tuple(call.result.tokens[i, :count].tolist())
            if count:
                made.setdefault((seq_id, tokens), []).append(call.result.hidden[i, :count])


CHECKS = {"chain": check_chain, "glue": check_glue, "branch": check_branch}


@pytest.mark.parametrize("layout", ["rows", "tree_mask"])
@pytest.mark.parametrize("family", list(THETA))
def test_every_logit_stands_on_the_right_triples(
    pairs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    if layout == "tree_mask" and not load_backend(DEVICE).capabilities.tree_mask:
        pytest.skip(f"{DEVICE} has no tree masks")
    config = speculation(
        pairs[family], "ssd", "eagle3", lookahead=3, fan_out=3, on_miss="draft", branch_lowering=layout
    )
    engine = make_engine(pairs[family], config, graphs=False)  # a round in one graph has no calls to record
    drafter = worker_of(engine)._drafter
    assert isinstance(drafter, PagedDrafter)
    recorder = Recorder(drafter, monkeypatch)
    result = drive(engine, PROMPTS, greedy(40))
    engine.close()
    texts = {i: prompt + tokens for i, (prompt, tokens) in enumerate(zip(PROMPTS, result.tokens, strict=True))}
    with torch.inference_mode():
        reference = Reference(pairs[family], family, texts)
        seen: Counter[str] = Counter()
        for call in recorder.calls[:: max(1, len(recorder.calls) // SOME_CALLS)]:
            CHECKS[call.kind](call, reference, seen)
        check_provenance(recorder.calls, seen)
    wanted = {
        "first step",
        "chain",
        "extend",
        "branch",
        *(f"{kind} {j}" for kind in ("glue", "fork") for j in range(4)),
    }
    assert wanted <= set(+seen), f"never happened: {wanted - set(+seen)}"
