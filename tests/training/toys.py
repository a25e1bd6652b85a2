"""A tiny target with text of its own, and everything that training needs around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.training.conversations import Conversations, pack
from ssd_ascend.training.head import HeadShape
from ssd_ascend.training.start import first_weights
from ssd_ascend.training.target import Source, Target, load_target, readings
from ssd_ascend.training.unroll import Lesson, make_lesson
from ssd_ascend.training.vocabulary import DraftVocabulary, choose_vocabulary
from tests.toys import causal_lm_tensors, llama_config, qwen3_config, write_checkpoint

FAMILIES = {"llama": llama_config, "qwen3": qwen3_config}
VOCAB, EOS = 64, 2


@dataclass(frozen=True)
class World:
    """A target, text, and a head that has learned nothing yet."""

    path: Path
    target: Target
    text: Conversations
    source: Source
    vocabulary: DraftVocabulary
    shape: HeadShape
    weights: dict[str, torch.Tensor]
    lesson: Lesson


def nothing(done: int, total: int) -> None:
    """A progress nobody watches."""


def random_text(lengths: tuple[int, ...] = (20, 33, 12, 50, 41, 17), *, seed: int = 0, first: int = 5) -> Conversations:
    """Random tokens, those from the first-th on being answers; every ninth is a fork."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB, (length,), generator=random) for length in lengths]
    places = [torch.arange(length) for length in lengths]
    return pack(
        (rows, [place >= first for place in places], [(place % 9 == 8) for place in places]),
        torch.zeros(len(rows), dtype=torch.bool),
    )


def make_world(directory: Path, family: str = "llama", *, draft_vocab: int = 40, start: str = "target") -> World:
    """Everything in float32 on the CPU."""
    config = FAMILIES[family](vocab_size=VOCAB, eos_token_id=EOS, max_position_embeddings=256)
    path = write_checkpoint(directory / "target", config, causal_lm_tensors(config))
    target = load_target(path, load_backend("cpu"), dtype="float32", read_tokens=256, max_length=128)
    text = random_text()
    vocabulary = choose_vocabulary(text, draft_vocab, VOCAB, frozenset({EOS}))
    shape = HeadShape(target.loaded.config, draft_vocab, target.capture_layers)
    weights = first_weights(shape, target, vocabulary, start=start, seed=0)  # type: ignore[arg-type]
    lesson = make_lesson(target, vocabulary, max_positions=160, compiled=False, dtype=torch.float32)
    source = readings(target, text, workspace=0, progress=nothing)
    return World(path, target, text, source, vocabulary, shape, weights, lesson)
