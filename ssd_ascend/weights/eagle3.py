"""EAGLE-3 heads from disk: names of all producers, the map of draft ids to target ids, what the target must lend.

Two steps, as for models: `config = read_eagle3_config(path, target_config)`, make a `BuildContext`, `load_eagle3(...)`.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ssd_ascend.architectures.eagle3 import Eagle3Head
from ssd_ascend.architectures.registry import CausalLM
from ssd_ascend.config.eagle3 import Eagle3Config, RopeChoice, eagle3_config
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.slots import collect_slots
from ssd_ascend.log import fields, get_logger
from ssd_ascend.weights.fill import Progress, fill
from ssd_ascend.weights.loader import CONFIG, open_source, read_config, read_json
from ssd_ascend.weights.pickled import PICKLE, PickleSource
from ssd_ascend.weights.renamed import RenamedSource
from ssd_ascend.weights.safetensors import INDEX, SINGLE, SafetensorsSource
from ssd_ascend.weights.source import TensorSource

log = get_logger(__name__)
_IGNORED = ("d2t", "t2d")  # read here, not by a layer
_KNOWN = re.compile(
    r"(?:^|\.)((?:midlayer|layers\.0)\..+|fc\..+|fc_norm\..+|(?:input_norm|norm|lm_head|embed_tokens)\.\w+)$"
)


def read_eagle3_config(
    path: str | Path,
    target: ModelConfig,
    *,
    rope: RopeChoice = "draft",
    capture_layers: tuple[int, ...] | None = None,
) -> Eagle3Config:
    """What the head in directory `path` is, checked against its target; reads no weights.

    `rope`: whose rotary settings the head uses. `capture_layers` (layer inputs) overrules the head's config.
    """
    directory = Path(path)
    data = read_json(directory / CONFIG)
    with open_head(directory) as source:
        shapes = {name: info.shape for name, info in source.tensors.items()}
    return eagle3_config(
        data, where=str(directory / CONFIG), shapes=shapes, target=target, rope=rope, capture_layers=capture_layers
    )


def load_eagle3(
    path: str | Path,
    config: Eagle3Config,
    ctx: BuildContext,
    *,
    target: str | Path,
    max_positions: int,
    share: CausalLM | None = None,
    progress: Progress | None = None,
) -> Eagle3Head:
    """Build the head and fill it, in `ctx.dtype` on `ctx.device`.

    An embedding or head it does not bring along is `share`'s, if that target model lives on the same device and ranks,
    else read from the checkpoint at `target`. `max_positions` may exceed what the head was trained for.
    """
    with open_head(Path(path)) as source:
        _warn_of_cast(source, ctx)
        d2t = draft_to_target(source, config)
        embedding = lm_head = None
        if share is not None and _same_place(share, ctx):
            embedding = None if config.own_embedding else share.model.embed_tokens
            lm_head = None if config.own_lm_head else share.lm_head
        head = Eagle3Head(config, ctx, d2t=d2t, max_positions=max_positions, embedding=embedding, lm_head=lm_head)
        _borrow(head, config, ctx, target)
        fill(head, source, ignored=_IGNORED, progress=progress)
    return head


def draft_to_target(source: TensorSource, config: Eagle3Config) -> torch.Tensor:
    """int64 [draft_vocab]: the target's id of each draft id, strictly increasing.

    Files hold offsets (target id = i + d2t[i]). A table that only makes sense as target ids is taken as that, but only
    if `t2d`, the mask of target ids that have a draft id, agrees. ConfigError when neither reading works.
    """
    size, vocab = config.draft_vocab_size, config.layer.vocab_size
    ids = torch.arange(size)
    if "d2t" not in source.tensors:
        return ids
    table = source.read("d2t").to("cpu", torch.int64)  # a source may read onto its device
    if table.shape != (size,):
        raise ConfigError(f"{source.where}: 'd2t' has shape {list(table.shape)}, the draft vocabulary {size}")
    mask = source.read("t2d").cpu().bool() if "t2d" in source.tensors else None
    kept = mask.nonzero().flatten() if mask is not None and mask.any() else None
    for reading in (ids + table, table):
        usable = bool((reading.diff() > 0).all()) and int(reading[0]) >= 0 and int(reading[-1]) < vocab
        if usable and (torch.equal(reading, kept) if kept is not None else reading is not table):
            return reading
    raise ConfigError(
        f"{source.where}: 'd2t' does not map {size} draft ids into the target's {vocab}: read as offsets, ids run from "
        f"{int((ids + table).min())} to {int((ids + table).max())}" + ("" if kept is None else ", and 't2d' disagrees"),
        remedy="download the head again, or export it anew",
    )


def canonical_name(name: str) -> str:
    """A producer's tensor name as ours: wrappers' prefixes go, `layers.0.` is `midlayer.`; unknown names stay."""
    name = re.sub(r"(?:^|.*\.)draft_id_to_target_id$", "d2t", name)
    if name.rpartition(".")[2] in _IGNORED:
        return name.rpartition(".")[2]
    found = _KNOWN.search(name)
    return re.sub(r"^layers\.0\.", "midlayer.", found[1]) if found else name


def open_head(directory: Path) -> TensorSource:
    """The tensors of the head in `directory`, by canonical names; use it in a `with` block."""
    if not directory.is_dir():
        raise ConfigError(f"no EAGLE-3 head at {directory}: it is not a directory", remedy="give the head's directory")
    pickled = directory / PICKLE
    plain = any((directory / name).is_file() for name in (INDEX, SINGLE))
    source: TensorSource = PickleSource(pickled) if pickled.is_file() and not plain else SafetensorsSource(directory)
    return RenamedSource(source, canonical_name)


def _borrow(head: Eagle3Head, config: Eagle3Config, ctx: BuildContext, target: str | Path) -> None:
    """Fill what the head lacks from the target's checkpoint; layers shared with a loaded target ask for nothing."""
    slots = collect_slots(head)
    needed = {
        ours: theirs
        for ours, theirs, own in (
            ("embed_tokens.weight", ("model.embed_tokens.weight",), config.own_embedding),
            ("lm_head.weight", ("lm_head.weight", "model.embed_tokens.weight"), config.own_lm_head),
        )
        if ours in slots and not own
    }
    if not needed:
        return
    target_config = read_config(target)
    with open_source(target, target_config, ctx) as source:
        for ours, candidates in needed.items():
            if target_config.tie_word_embeddings:
                candidates = candidates[-1:]
            theirs = next((name for name in candidates if name in source.tensors), None)
            if theirs is None:
                raise ConfigError(f"{source.where} lacks tensor {candidates[0]!r}, which the EAGLE-3 head borrows")
            slots[ours].load(source.read(theirs))


def _same_place(share: CausalLM, ctx: BuildContext) -> bool:
    theirs = share.lm_head.ctx
    return (theirs.device, theirs.dtype, theirs.collectives.size) == (ctx.device, ctx.dtype, ctx.collectives.size)


def _warn_of_cast(source: TensorSource, ctx: BuildContext) -> None:
    """float16 in bfloat16 loses three bits of mantissa; serving the head in float16 could overflow instead."""
    saved = {info.dtype for info in source.tensors.values() if info.dtype.is_floating_point}
    if torch.float16 in saved and ctx.dtype == torch.bfloat16:
        log.warning("the head was saved in float16 and is served in bfloat16 %s", fields(path=source.where))
