"""The head as it is trained is the head as it is served: same numbers, and gradients that are gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.progress import bar
from ssd_ascend.speculation.base import Branch, DraftSequence
from ssd_ascend.speculation.drafters import eagle3
from ssd_ascend.speculation.setup import DraftSetup, TargetFacts
from ssd_ascend.training.attention import ChainAttention, Kernels, PlainTrunk, Segments
from ssd_ascend.training.batches import make_batch
from ssd_ascend.training.conversations import Conversations
from ssd_ascend.training.export import export
from ssd_ascend.training.head import LM_HEAD, Cast, Chain
from ssd_ascend.training.loss import VocabularyLoss, slope
from ssd_ascend.training.pipeline import Means
from ssd_ascend.training.target import load_target
from ssd_ascend.training.unroll import _fed, outcomes
from ssd_ascend.training.verdict import load_head
from ssd_ascend.weights.eagle3 import read_eagle3_config
from tests.toys import eagle3_tensors, llama_config, speculators_config, write_checkpoint
from tests.training.toys import EOS, VOCAB, World, make_world


def drafter_of(world: World, head: Path, lookahead: int) -> object:
    """The engine's own EAGLE-3 drafter over an exported head."""
    config = world.target.loaded.config
    facts = TargetFacts(
        path=str(world.path), vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        num_layers=config.num_layers, max_model_len=128, max_num_seqs=4, max_batched_tokens=256, kv_tokens=1024,
        dtype="float32",
        feature_width=len(world.target.capture_layers) * config.hidden_size,
    )  # fmt: skip
    speculation = SpeculationConfig(speculator="sd", drafter="eagle3", draft=str(head), lookahead=lookahead)
    backend = load_backend("cpu")
    return eagle3.build(
        DraftSetup(backend=backend, device=backend.device(0), config=speculation, target=facts, path=head, width=8)
    )


def sequence(world: World, tokens: list[int], features: torch.Tensor) -> DraftSequence:
    """`tokens` as the drafter sees them, with the target's features of all but the last."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    return DraftSequence(0, tokens, 1, sampling, 0, frozenset(), features=features[: len(tokens) - 1])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chains_are_those_of_the_engine(tmp_path: Path, family: str) -> None:
    """From every start of a text, fed with what the engine's drafter drafted, each step's logits are the drafter's."""
    world = make_world(tmp_path, family, start="random")
    export(tmp_path / "head", world.weights, world.shape, world.vocabulary, dtype=torch.float32)
    lookahead = 4
    drafter = drafter_of(world, tmp_path / "head", lookahead)
    text = world.text.row(3)
    features = world.target.read([text]).features
    for end in (2, 7, 19):
        chain = drafter.chain([sequence(world, text[:end], features)], lookahead)  # type: ignore[attr-defined]
        drafted = chain.tokens[0].tolist()
        # the training side, on the text as it would be had the drafts come true
        told = [*text[:end], *drafted]
        read = world.target.read([told])
        batch = make_batch(whole(told), [0], len(told), world.target.device)
        result = outcomes(world.weights, world.lesson, batch, read, lookahead)
        assert result.rank[:, end - 2].tolist() == [0] * lookahead, f"end {end}: the chains differ"


def test_heads_of_others_are_judged_as_they_are_served(tmp_path: Path) -> None:
    """The dialect of vLLM's speculators: another rotation and sizes, an embedding of its own, normed residuals."""
    world = make_world(tmp_path)
    config = llama_config(vocab_size=VOCAB, eos_token_id=EOS, max_position_embeddings=256)
    head = speculators_config(config, embed_requires_grad=True)
    head["transformer_layer_config"] |= {"rope_theta": 500.0, "max_position_embeddings": 256}
    tensors = eagle3_tensors(head, config)
    tensors["embed_tokens.weight"] = torch.randn(
        VOCAB, config["hidden_size"], generator=torch.Generator().manual_seed(5)
    )
    path = write_checkpoint(tmp_path / "theirs", head, tensors)
    read = read_eagle3_config(path, world.target.loaded.config)
    target = load_target(
        world.path, load_backend("cpu"), dtype="float32", read_tokens=256, max_length=128,
        capture_layers=read.capture_layers,
    )  # fmt: skip
    means = Means(load_backend("cpu"), "float32", None, bar)
    weights, lesson = load_head(path, read, target, means, max_positions=160)
    text = world.text.row(3)
    drafter = drafter_of(world, path, 4)
    chain = drafter.chain([sequence(world, text[:9], target.read([text]).features)], 4)  # type: ignore[attr-defined]
    told = [*text[:9], *chain.tokens[0].tolist()]
    batch = make_batch(whole(told), [0], len(told), target.device)
    result = outcomes(weights, lesson, batch, target.read([told]), 4)
    assert result.rank[:, 7].tolist() == [0] * 4


def whole(tokens: list[int]) -> Conversations:
    """One conversation, all of it an answer."""
    marks = torch.ones(len(tokens), dtype=torch.bool)
    return Conversations(
        torch.tensor(tokens), marks, ~marks, torch.tensor([0, len(tokens)]), torch.zeros(1, dtype=torch.bool)
    )


def test_branches_are_later_steps_of_the_same_chain(tmp_path: Path) -> None:
    """What evaluation takes for a cached branch is what the drafter's glue and branch make of it."""
    world = make_world(tmp_path, start="random")
    export(tmp_path / "head", world.weights, world.shape, world.vocabulary, dtype=torch.float32)
    lookahead, depth, end = 4, 2, 11
    drafter = drafter_of(world, tmp_path / "head", lookahead)
    text = world.text.row(4)
    features = world.target.read([text]).features
    seq = sequence(world, text[:end], features)
    chain = drafter.chain([seq], lookahead)  # type: ignore[attr-defined]
    sent = tuple(chain.tokens[0].tolist())
    glue = drafter.glue([seq], [sent], [chain.hidden[0]])  # type: ignore[attr-defined]
    guess = next(int(t) for t in world.vocabulary.to_target.tolist() if t != sent[depth])
    branch = drafter.branch(  # type: ignore[attr-defined]
        [Branch(seq, depth, depth)], torch.tensor([guess]), glue, [sent], lookahead, lambda: False
    )
    told = [*text[:end], *sent[:depth], guess, *branch.tokens[0].tolist()]
    read = world.target.read([told])
    batch = make_batch(whole(told), [0], len(told), world.target.device)
    result = outcomes(world.weights, world.lesson, batch, read, depth + 1 + lookahead)
    column = result.rank[:, end - 2].tolist()
    assert column[:depth] == [0] * depth
    assert column[depth] != 0
    assert column[depth + 1 :] == [0] * lookahead


def test_attention_matches_a_mask_written_out() -> None:
    """ChainAttention and its gradients against one softmax over explicitly gathered keys."""
    torch.manual_seed(0)
    rows, heads, kv_heads, width, steps, scale = 13, 4, 2, 8, 3, 0.3
    owner = torch.tensor([0] * 5 + [1] * 8)
    segments = Segments(torch.tensor([0, 5, 13], dtype=torch.int32), 8, owner)
    q = torch.randn(rows, heads, width, dtype=torch.float64, requires_grad=True)
    keys_values = [
        torch.randn(rows, kv_heads, width, dtype=torch.float64, requires_grad=True) for _ in range(2 * steps)
    ]
    out = ChainAttention.apply(Kernels(PlainTrunk()), segments, scale, q, *keys_values)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [q, *keys_values], grad)

    wide = [x.repeat_interleave(heads // kv_heads, 1) for x in keys_values]
    place = torch.arange(rows)
    seen = (owner[:, None] == owner) & (place[:, None] >= place)
    scores = torch.einsum("qhd,khd->qhk", q, wide[0]) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    own = [(q * key).sum(-1, keepdim=True) * scale for key in wide[2::2]]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    expected = torch.einsum("qhk,khd->qhd", weights[..., :rows], wide[1])
    for i, value in enumerate(wide[3::2]):
        expected = expected + weights[..., rows + i, None] * value
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(expected, [q, *keys_values], grad), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("overlap_weight", [0.0, 0.5, 1.0])
def test_loss_gradient_is_the_gradient_of_the_loss(overlap_weight: float) -> None:
    """The gradient written by hand against autograd over the same formula."""
    torch.manual_seed(1)
    normed = torch.randn(9, 6, requires_grad=True)
    head = torch.randn(11, 6, requires_grad=True)
    probs = torch.rand(9, 11).softmax(-1) * torch.rand(9, 1)
    best, weight = torch.randint(0, 11, (9,)), torch.rand(9)
    loss, right = VocabularyLoss.apply(normed, head, probs, best, weight, overlap_weight, slope)
    (2.0 * loss).backward()
    found = normed.grad, head.grad

    normed.grad = head.grad = None
    logits = normed @ head.t()
    log_q = logits.log_softmax(-1)
    mass = probs.sum(-1)
    overlap = torch.minimum(probs, log_q.exp()).sum(-1)
    each = -(1 - overlap_weight) * (probs * log_q).sum(-1) - overlap_weight * mass * overlap.log()
    expected = (each * weight).sum()
    (2.0 * expected).backward()
    torch.testing.assert_close(loss, expected)
    assert float(right) == pytest.approx(float(((logits.argmax(-1) == best) * weight).sum()))
    for ours, theirs in zip(found, (normed.grad, head.grad), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_chain_does_not_see_its_neighbours(tmp_path: Path) -> None:
    """Packing is invisible: a conversation's chains are the same alone and among others."""
    world = make_world(tmp_path)
    cast = Cast.of(world.weights, torch.float32)
    together = make_batch(world.text, [1, 0, 3], 128, world.target.device)
    alone = make_batch(world.text, [3], 50, world.target.device)
    ends = []
    for batch in (together, alone):
        chain = Chain(
            cast, world.shape.target, world.lesson.arithmetic, batch.segments, world.source.fetch(batch).features
        )
        normed = [chain.advance(*_fed(world.lesson, batch, step)) for step in (1, 2, 3)][-1]
        ends.append(normed @ world.weights[LM_HEAD].t())
    begin = 33 + 20
    torch.testing.assert_close(ends[0][begin : begin + 47], ends[1][:47], atol=1e-5, rtol=1e-5)
