"""A head from nothing: what the door `train` calls, in the order in which things happen."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.config.training import Run, TrainingConfig
from ssd_ascend.errors import ConfigError, first_line
from ssd_ascend.log import fields, get_logger
from ssd_ascend.text import Tokenizer
from ssd_ascend.training.conversations import Conversations, check_vocabulary, read_jsonl, split
from ssd_ascend.training.export import export, head_config, write_card
from ssd_ascend.training.head import HeadShape, default_capture_layers
from ssd_ascend.training.loss import CHUNK
from ssd_ascend.training.prompts import Openings, TurnMarks, turn_marks
from ssd_ascend.training.run_folder import RunFolder, replace_text, writing
from ssd_ascend.training.start import first_weights
from ssd_ascend.training.synthesis import synthesize
from ssd_ascend.training.target import Target, load_target, readings
from ssd_ascend.training.trainer import Material, train
from ssd_ascend.training.unroll import make_lesson
from ssd_ascend.training.vocabulary import choose_vocabulary
from ssd_ascend.weights.loader import read_config

log = get_logger(__name__)
_READ_TOKENS, _READ_TOKENS_HOST = 65_536, 4_096
_DEFAULT_VOCAB = 32_000
LOG = "training.json"
Bar = Callable[..., AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True, slots=True)
class Means:
    """What a run is made with, beside its numbers: they change how fast it is, not what it makes."""

    backend: Backend
    dtype: str
    compiled: bool | None
    """None: where there is a compiler worth waiting for, which is not on a host's own processor."""
    bar: Bar

    def compiles(self, device: torch.device) -> bool:
        """Whether functions are compiled: as told, else where a small one compiles and runs."""
        if self.compiled is not None or self.backend.capabilities.host_memory:
            return bool(self.compiled)
        try:
            return float(torch.compile(torch.square)(torch.ones(2, device=device)).sum()) == 2.0
        except (RuntimeError, ImportError, OSError) as error:
            log.warning("functions are not compiled, training is slower: %s", first_line(error))
            return False

    def target(self, path: Path, max_length: int, capture_layers: tuple[int, ...] | None = None) -> Target:
        """The target, ready to read texts of up to `max_length` tokens."""
        tokens = _READ_TOKENS_HOST if self.backend.capabilities.host_memory else _READ_TOKENS
        with self.bar("loading") as progress:
            return load_target(
                path, self.backend, dtype=self.dtype, read_tokens=tokens, max_length=max_length,
                capture_layers=capture_layers, progress=progress,
            )  # fmt: skip


def make_head(run: Run, path: Path, out: Path, means: Means, *, command: str) -> dict[str, Any]:
    """Text, readings, training, export into `out`; goes on where an earlier call with the same `run` stopped.

    Whatever is wrong with the input is found before `out` is touched. Returns what `training.json` in `out` holds: the
    run, and the log of `trainer.train`.
    """
    config, given = run.training, _look_at(run, path)
    folder = RunFolder(out, run)
    target = means.target(path, given.max_length)
    text = given.text or _written(run, folder, target, given, means)
    check_vocabulary([text], given.model.vocab_size)
    learn, judged = split(text, config.held_out, config.seed)
    ends = given.tokenizer.eos_ids
    vocabulary = choose_vocabulary(learn, given.draft_vocab, given.model.vocab_size, ends)
    log.info("text %s", fields(conversations=len(text), tokens=len(text.tokens), answers=int(text.answer.sum()),
                               draft_vocab=vocabulary.size, covered=vocabulary.covered))  # fmt: skip
    shape = HeadShape(given.model, vocabulary.size, target.capture_layers)
    weights = first_weights(shape, target, vocabulary, start=config.start, seed=config.seed)
    with means.bar("reading") as progress:
        source = readings(target, learn, workspace=_workspace(shape, config, target), progress=progress)
        held_out = readings(target, judged, workspace=0, progress=progress) if len(judged) else None
    lesson = make_lesson(
        target, vocabulary, max_positions=given.max_length + config.unroll + 8,
        compiled=means.compiles(target.device), dtype=target.activations,
    )  # fmt: skip
    with means.bar("training") as progress:
        material = Material(learn, source, judged, held_out, ends)
        records = train(weights, lesson, material, config, folder=folder, progress=progress)
    dtype = target.loaded.dtype if target.loaded.dtype != torch.float32 else torch.bfloat16
    export(out, weights, shape, vocabulary, dtype=dtype)
    facts = _facts(target, learn, vocabulary.covered, shape)
    result = {"command": command, "run": run.to_dict(), "log": records, **facts}
    replace_text(out / LOG, json.dumps(result, indent=1))
    write_card(out, _card(run, result, dtype))
    return result


class _Given(NamedTuple):
    """What a run has to go by. `text` when it was given; else `openings` and `marks` to write some with."""

    tokenizer: Tokenizer
    model: ModelConfig
    draft_vocab: int
    max_length: int
    text: Conversations | None
    openings: Openings | None
    marks: TurnMarks | None


def _look_at(run: Run, path: Path) -> _Given:
    """Read everything but weights."""
    tokenizer, model, synthesis = Tokenizer.load(path), read_config(path), run.synthesis
    size = run.training.draft_vocab or min(_DEFAULT_VOCAB, model.vocab_size)
    if size > model.vocab_size:
        raise ConfigError(
            f"draft_vocab is {size}, the target's vocabulary {model.vocab_size}", remedy="give no more than that"
        )
    head_config(HeadShape(model, size, default_capture_layers(model.num_layers)), torch.bfloat16)  # or it says why not
    wanted = run.training.batch_tokens if synthesis is None else synthesis.max_length
    max_length = min(wanted, model.max_position_embeddings)
    if run.data is not None:
        text = read_jsonl(Path(run.data), tokenizer, max_length=max_length)
        return _Given(tokenizer, model, size, max_length, text, None, None)
    openings = Openings.load(Path(run.openings) if run.openings else None, tokenizer)
    return _Given(tokenizer, model, size, max_length, None, openings, turn_marks(tokenizer))


def _written(run: Run, folder: RunFolder, target: Target, given: _Given, means: Means) -> Conversations:
    """The target's own text: kept from before, or written now."""
    if folder.text.is_file():
        return Conversations.load(folder.text)
    assert run.synthesis is not None
    assert given.openings is not None
    assert given.marks is not None
    config = replace(run.synthesis, max_length=given.max_length)
    with means.bar("writing") as progress:
        text = synthesize(target, given.openings, given.marks, config, seed=run.training.seed, progress=progress)
    with writing(folder.text):
        text.save(folder.text)
    return text


def _workspace(shape: HeadShape, config: TrainingConfig, target: Target) -> int:
    """Bytes that a training step takes, generously."""
    itemsize = target.activations.itemsize
    a_token = config.unroll * (16 * shape.target.hidden_size + 6 * shape.target.intermediate_size) + shape.draft_vocab
    return int(1.5 * (config.batch_tokens * a_token * itemsize + CHUNK * shape.draft_vocab * 16))


def _facts(target: Target, text: Conversations, covered: float, shape: HeadShape) -> dict[str, Any]:
    return {
        "device": target.backend.describe(target.device),
        "torch": torch.__version__,
        "parameters": shape.num_parameters,
        "draft_vocab": shape.draft_vocab,
        "covered": round(covered, 5),
        "conversations": len(text),
        "tokens": len(text.tokens),
        "answer_tokens": int(text.answer.sum()),
    }


def _card(run: Run, result: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    last = result["log"][-1]
    origin = f"read from `{run.data}`" if run.data else "written by the target itself; no data set was used"
    return {
        "target": Path(run.target).name,
        "dtype": str(dtype).removeprefix("torch."),
        "data": f"{result['conversations']:,} conversations, {result['tokens']:,} tokens, {origin}",
        "licence": "the target's",
        "steps": run.training.steps,
        "batch_tokens": run.training.batch_tokens,
        "unroll": run.training.unroll,
        "seconds": last["seconds"],
        "tokens_per_s": last["tokens_per_s"],
        "by_depth": last.get("held_out_by_depth", last["accuracy"]),
        "tokens_per_round": last.get("held_out_tokens_per_round", 0.0),
        **{name: result[name] for name in ("command", "parameters", "draft_vocab", "covered", "device")},
    }
