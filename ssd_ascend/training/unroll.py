"""One batch through the head: the unrolled loss, and what each chain would have got right, for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.config.training import TrainingConfig
from ssd_ascend.layers.rotary import rotary_table
from ssd_ascend.training.attention import Kernels, choose_trunk
from ssd_ascend.training.batches import Batch
from ssd_ascend.training.head import LM_HEAD, Arithmetic, Cast, Chain, Weights
from ssd_ascend.training.loss import Slope, VocabularyLoss, matmul_float32, slope
from ssd_ascend.training.target import Read, Target, teach
from ssd_ascend.training.vocabulary import DraftVocabulary

_SCORE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Lesson:
    """All that a batch is taught with, beside the weights."""

    target: Target
    layer: ModelConfig
    """The head's one layer."""
    embedding: torch.Tensor
    vocabulary: DraftVocabulary
    head_rows: torch.Tensor
    """The target's vocabulary head, its rows of the draft vocabulary."""
    angles: torch.Tensor
    """float32 [P, 2, R / 2], cosines and sines of every position a chain may reach."""
    arithmetic: Arithmetic
    slope: Slope
    dtype: torch.dtype
    normed_residual: bool = False

    def chain(self, weights: Weights, batch: Batch, read: Read) -> Chain:
        """Every chain of a batch, before its first step."""
        return Chain(
            Cast.of(weights, self.dtype), self.layer, self.arithmetic, batch.segments, read.features.to(self.dtype),
            normed_residual=self.normed_residual,
        )  # fmt: skip


class Losses(NamedTuple):
    """Sums over the chains of a batch: loss, and right guesses and weight of every step [S]."""

    loss: torch.Tensor
    right: torch.Tensor
    weight: torch.Tensor


def make_lesson(
    target: Target,
    vocabulary: DraftVocabulary,
    *,
    max_positions: int,
    compiled: bool,
    dtype: torch.dtype,
    layer: ModelConfig | None = None,
    embedding: torch.Tensor | None = None,
    normed_residual: bool = False,
) -> Lesson:
    """Bring the vocabulary to the device and choose the arithmetic: the fused trunk where it works, compiled functions
    where asked for. `layer` and `embedding` are the target's unless a head brings its own."""
    config, device = layer or target.loaded.config, target.device
    moved = DraftVocabulary(vocabulary.to_target.to(device), vocabulary.to_draft.to(device), vocabulary.covered)
    arithmetic = Arithmetic(Kernels(choose_trunk(device, dtype, config.num_heads, config.head_dim)))
    table = rotary_table(config.rope, config.head_dim, max_positions, device)
    return Lesson(
        target=target,
        layer=config,
        embedding=target.embedding if embedding is None else embedding,
        vocabulary=moved,
        head_rows=target.lm_head[moved.to_target],
        angles=table.unflatten(1, (2, -1)),
        arithmetic=_compiled(arithmetic) if compiled else arithmetic,
        slope=torch.compile(slope) if compiled else slope,
        dtype=dtype,
        normed_residual=normed_residual,
    )


def _compiled(plain: Arithmetic) -> Arithmetic:
    """The same, fused: between the matrix products there is nothing but small operators over large tensors."""
    kernels = plain.kernels._replace(fold=torch.compile(plain.kernels.fold), unfold=torch.compile(plain.kernels.unfold))
    return Arithmetic(kernels, torch.compile(plain.enter), torch.compile(plain.rotate), torch.compile(plain.leave))


def unrolled_loss(weights: Weights, lesson: Lesson, batch: Batch, read: Read, config: TrainingConfig) -> Losses:
    """The loss of `config.unroll` steps, divided by the weight of all of them: ready for `backward`."""
    teacher = teach(lesson.target, read, lesson.vocabulary, lesson.head_rows, config.unroll)
    chain = lesson.chain(weights, batch, read)
    forks = functional.pad(batch.forked.long().cumsum(0), (0, config.unroll))
    losses, rights, sums = [], [], []
    for step in range(1, config.unroll + 1):
        normed = chain.advance(*_fed(lesson, batch, step))
        counts = counted(batch, step).float()
        after_fork = (forks[step : step + batch.size] > forks[: batch.size]).float()
        weight = counts * (1.0 + config.fork_weight * after_fork) * config.step_decay ** (step - 1)
        probs, best = (part[step : step + batch.size] for part in teacher)
        loss, right = VocabularyLoss.apply(
            normed, weights[LM_HEAD], probs, best, weight, config.overlap_weight, lesson.slope
        )
        losses.append(loss)
        sums.append(weight.sum())
        rights.append(right / config.step_decay ** (step - 1))
    total = torch.stack(sums)
    decays = config.step_decay ** torch.arange(config.unroll, device=total.device)
    return Losses(torch.stack(losses).sum() / total.sum().clamp_min(1.0), torch.stack(rights), total / decays)


class Outcomes(NamedTuple):
    """Of step s (row s - 1) of the chain that starts at u, fed with the true text all along.

    rank: int32 [S, N], of the text's next token among the head's logits; 0: it is the guess, huge: it has no logit.
    chance: float32 [S, N], that a draft of temperature 1 is that token and is accepted, given that the text has it:
    min(1, q / p).
    """

    rank: torch.Tensor
    chance: torch.Tensor


@torch.inference_mode()
def outcomes(weights: Weights, lesson: Lesson, batch: Batch, read: Read, depth: int) -> Outcomes:
    """Everything about drafting, chains and branches alike, can be read off these two tables (see `evaluation.py`)."""
    chain = lesson.chain(weights, batch, read)
    head = weights[LM_HEAD].to(lesson.dtype)
    ranks, chances = [], []
    for step in range(1, depth + 1):
        normed = chain.advance(*_fed(lesson, batch, step))
        rank, chance = _judge(normed, head, lesson, read, ahead(batch.tokens, step + 1), step)
        ranks.append(rank.masked_fill(batch.left < step + 1, torch.iinfo(torch.int32).max))
        chances.append(chance.masked_fill(batch.left < step + 1, 0.0))
    return Outcomes(torch.stack(ranks), torch.stack(chances))


def _judge(
    normed: torch.Tensor, head: torch.Tensor, lesson: Lesson, read: Read, text: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank and chance of each row's next token `text` [N]."""
    wanted = lesson.vocabulary.to_draft[text]
    states, sums = ahead(read.normed, step), ahead(read.log_sum, step)
    rows = lesson.target.lm_head
    ranks, chances = [], []
    for first in range(0, len(text), _SCORE_ROWS):
        part = slice(first, first + _SCORE_ROWS)
        logits = matmul_float32(normed[part], head.t())
        own = logits.gather(1, wanted[part].clamp_min(0).unsqueeze(1))
        rank = (~(logits <= own)).sum(-1, dtype=torch.int32)  # a head that says NaN has guessed nothing
        ranks.append(rank.masked_fill(wanted[part] < 0, torch.iinfo(torch.int32).max))
        log_p = (states[part].float() * rows[text[part]].float()).sum(-1) - sums[part]
        log_q = own.squeeze(1) - logits.logsumexp(-1)
        chances.append((log_q - log_p).clamp_max(0.0).exp().masked_fill(wanted[part] < 0, 0.0))
    return torch.cat(ranks), torch.cat(chances)


def counted(batch: Batch, step: int) -> torch.Tensor:
    """Chains whose step `step` foretells a token of an answer, bool [N]. The first position's feature is unlike all
    others (rms about 1000 against 10), and nothing is ever drafted from it alone."""
    return (batch.left >= step + 1) & ahead(batch.answer, step + 1) & (batch.place >= 1)


def ahead(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row u is what row u + by was; what comes round at the end is for the caller to mask."""
    return x.roll(-by, 0)


def _fed(lesson: Lesson, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What chains are fed at a step: the embedding of the text's token, and the angles of its entry."""
    fed = functional.embedding(ahead(batch.tokens, step), lesson.embedding).to(lesson.dtype)
    place = (batch.place + step - 1).clamp_max(len(lesson.angles) - 1)
    return fed, lesson.angles[place]
