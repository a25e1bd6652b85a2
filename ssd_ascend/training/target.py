"""The target as a teacher: its features and its law at every position, for texts that are there already.

It is the engine's own runtime (`runtime.load`), so a head learns from exactly what it will be fed. Features of a whole
training set are kept on the device when they fit there, and computed again for every batch when they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import pad

from ssd_ascend.backends.base import Backend
from ssd_ascend.core.batch import Mode
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.log import fields, get_logger
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.load import CacheSize, LoadedModel, choose_block_size, choose_dtype, load_runner, make_context
from ssd_ascend.training.batches import Batch
from ssd_ascend.training.conversations import Conversations
from ssd_ascend.training.head import default_capture_layers
from ssd_ascend.training.loss import Teacher, matmul_float32
from ssd_ascend.training.vocabulary import DraftVocabulary
from ssd_ascend.weights.loader import open_source, read_config

log = get_logger(__name__)
_LOGIT_ROWS = 4096
_DEVICE_SHARE, _HOST_SHARE = 0.9, 0.3
Progress = Callable[[int, int], None]


class Read(NamedTuple):
    """Of T positions: features [T, F], the last state after its norm [T, H], float32 log-sum-exp of the logits [T], and
    the likeliest token int64 [T]."""

    features: torch.Tensor
    normed: torch.Tensor
    log_sum: torch.Tensor
    best: torch.Tensor


class Source(Protocol):
    """Where a batch's reading comes from."""

    def fetch(self, batch: Batch) -> Read:
        """In the batch's packed order; padding rows hold anything finite."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """The loaded target, and what the head borrows of it: embedding and vocabulary head [V, H], in serving dtype."""

    path: Path
    backend: Backend
    loaded: LoadedModel
    capture_layers: tuple[int, ...]
    embedding: torch.Tensor
    lm_head: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.loaded.runner.device

    @property
    def activations(self) -> torch.dtype:
        """What its features are kept in."""
        return self.loaded.runner.kv.tensor.dtype

    @property
    def row_capacity(self) -> int:
        """Tokens that one forward can read."""
        return self.loaded.runner.kv.num_blocks * self.loaded.runner.block_size

    def read(self, rows: list[list[int]]) -> Read:
        """Run whole texts, as many at a time as the cache holds."""
        block, used = self.loaded.runner.block_size, 0
        parts: list[Read] = []
        group: list[list[int]] = []
        for row in rows:
            need = -(-len(row) // block) * block
            if group and used + need > self.row_capacity:
                parts.append(self._forward(group))
                group, used = [], 0
            group.append(row)
            used += need
        parts.append(self._forward(group))
        return Read(*(torch.cat(pieces) for pieces in zip(*parts, strict=True))) if len(parts) > 1 else parts[0]

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> Read:
        runner, model = self.loaded.runner, self.loaded.model
        packed, block = [], 0
        for row in rows:
            count = -(-len(row) // runner.block_size)
            packed.append(Row(row, 0, range(block, block + count), len(row)))
            block += count
        batch = build_batch(Mode.PREFILL, packed, block_size=runner.block_size, device=self.device)
        runner.attention.plan(batch.attention)
        output = model.model(batch, runner.kv.layers)
        log_sum, best = [], []
        for part in output.normed.split(_LOGIT_ROWS):
            logits = model.lm_head(part)
            log_sum.append(logits.logsumexp(-1))
            best.append(logits.argmax(-1))
        assert output.features is not None
        return Read(output.features, output.normed, torch.cat(log_sum), torch.cat(best))


def load_target(
    path: Path,
    backend: Backend,
    *,
    dtype: str,
    read_tokens: int,
    max_length: int,
    capture_layers: tuple[int, ...] | None = None,
    progress: Progress | None = None,
) -> Target:
    """Load the target with a cache for reading `read_tokens` at once, in texts of up to `max_length`."""
    config = read_config(path)
    capture = capture_layers or default_capture_layers(config.num_layers)
    device, serving = backend.device(0), choose_dtype(dtype, config.dtype, backend.capabilities)
    block = choose_block_size(None, backend.capabilities)
    blocks = max(read_tokens, max_length) // block + 2
    loaded = load_runner(
        path, backend, device, SingleRank(), dtype=serving, block_size=block, capture_layers=capture, progress=progress,
        size=CacheSize(max_model_len=max_length, max_num_seqs=1, num_blocks=blocks),
    )  # fmt: skip
    loaded.runner.kv.features = None  # nobody reads them from there
    embedding = loaded.model.model.embed_tokens.weight
    assert embedding is not None
    head = embedding
    if not config.tie_word_embeddings:
        ctx = make_context(config, backend, device, SingleRank(), dtype=serving, block_size=block)
        with open_source(path, config, ctx) as source:
            head = source.read("lm_head.weight").to(device, serving)
    return Target(path, backend, loaded, capture, embedding, head)


class KeptReadings:
    """Everything read once and kept on the device."""

    def __init__(self, target: Target, data: Conversations, progress: Progress) -> None:
        self._read = _empty(target, len(data.tokens))
        done, lengths = 0, data.lengths.tolist()
        rows: list[list[int]] = []
        for i in range(len(data)):
            rows.append(data.row(i))
            size = sum(map(len, rows))
            if i + 1 == len(data) or size + lengths[i + 1] > target.row_capacity * 7 // 8:
                for kept, new in zip(self._read, target.read(rows), strict=True):
                    kept[done : done + size] = new
                done, rows = done + size, []
                progress(done, len(data.tokens))

    def fetch(self, batch: Batch) -> Read:
        """Gather by where the tokens lie."""
        return Read(*(part.index_select(0, batch.index) for part in self._read))


class FreshReadings:
    """Every batch read when it is wanted."""

    def __init__(self, target: Target, data: Conversations) -> None:
        self._target = target
        self._data = data

    def fetch(self, batch: Batch) -> Read:
        """One forward of the target, or a few."""
        rows = [self._data.row(index)[:count] for index, count in batch.rows]
        read = self._target.read(rows)
        short = batch.size - len(read.best)
        return Read(*(pad(part, (0, 0, 0, short) if part.dim() == 2 else (0, short)) for part in read))


def readings(target: Target, data: Conversations, *, workspace: int, progress: Progress) -> Source:
    """Kept readings where they fit beside `workspace` bytes, else fresh ones."""
    width = target.loaded.config.hidden_size * (len(target.capture_layers) + 1)
    size = len(data.tokens) * (width * target.activations.itemsize + 12)
    free = target.backend.memory(target.device).free - workspace
    share = _HOST_SHARE if target.backend.capabilities.host_memory else _DEVICE_SHARE
    kept = size < share * free
    log.info("features %s", fields(tokens=len(data.tokens), gb=size / 1e9, free_gb=free / 1e9, kept=kept))
    return KeptReadings(target, data, progress) if kept else FreshReadings(target, data)


def teach(target: Target, read: Read, vocabulary: DraftVocabulary, head: torch.Tensor, extra: int) -> Teacher:
    """The target's law over the draft vocabulary, with `extra` empty rows at the end. head: `target.lm_head`'s rows of
    that vocabulary, [Vd, H]."""
    rows = len(read.best)
    probs = torch.zeros((rows + extra, vocabulary.size), dtype=target.activations, device=target.device)
    for first in range(0, rows, _LOGIT_ROWS):
        part = slice(first, first + _LOGIT_ROWS)
        logits = matmul_float32(read.normed[part].to(head.dtype), head.t())
        probs[first : first + len(logits)] = (logits - read.log_sum[part].unsqueeze(-1)).exp_()
    return Teacher(probs, pad(vocabulary.to_draft[read.best], (0, extra), value=-1))


def _empty(target: Target, count: int) -> Read:
    hidden, device = target.loaded.config.hidden_size, target.device
    make = torch.empty
    return Read(
        make((count, len(target.capture_layers) * hidden), dtype=target.activations, device=device),
        make((count, hidden), dtype=target.activations, device=device),
        make(count, dtype=torch.float32, device=device),
        make(count, dtype=torch.int64, device=device),
    )
