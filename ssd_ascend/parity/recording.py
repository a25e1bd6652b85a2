"""Runs everything a golden run consists of, on one device: `record` writes what comes out, `check` compares it."""

from __future__ import annotations

import hashlib
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd_ascend import catalogue
from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.parity import checkpoints, numbers, prompts
from ssd_ascend.parity.drafts import draft_views
from ssd_ascend.parity.engines import Pair, Trace, pair_of, run_all
from ssd_ascend.parity.golden import Golden, Model
from ssd_ascend.parity.ops import OPERATOR, Bench, Tensors, cases
from ssd_ascend.parity.passes import forward_steps, verdicts
from ssd_ascend.runtime.load import choose_block_size, choose_dtype
from ssd_ascend.weights.loader import read_config

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run and where. Without a model: the three checkpoints of this room. prompts: those of a golden run, None
    for our own."""

    device: str | None
    dtype: str = "auto"
    model: str | None = None
    draft: str | None = None
    drafter: str = "model"
    prompts: list[list[int]] | None = None


def record(options: Options, tell: Tell) -> Golden:
    """One run on `options.device`. ConfigError when device or model cannot be had."""
    backend = load_backend(options.device)
    device = backend.device(0)
    saved = None if options.model is None else read_config(catalogue.resolve_model(options.model)).dtype
    dtype = choose_dtype(options.dtype, saved or "bfloat16", backend.capabilities)
    name = str(dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="ssd-parity-") as scratch, torch.inference_mode():
        model, pair = _models(options, Path(scratch))
        tell(f"{backend.describe(device)}, {name}: operators")
        bench = _bench(backend, device, dtype)
        tensors = {f"{OPERATOR}{case}": run(bench) for case, run in cases()}
        tell("layers and logits")
        tensors |= _by_kind(forward_steps(Path(pair.target), backend, device, dtype))
        tell("drafters and verdicts")
        for drafter, draft in pair.drafts.items():
            if draft is not None:
                tensors[f"drafter {drafter}"] = draft_views(pair.target, drafter, draft, backend, device, name)
        judged = verdicts(backend, device)
        traces: dict[str, list[Trace]] = {}
        asked = options.prompts
        if asked is None and options.model is not None:
            asked = prompts.questions(Path(pair.target))
        for way, own in run_all(pair, asked or _made(pair), backend.name, name):
            tell(f"engine: {way}")
            traces[way] = own
    return Golden(_about(backend, device, name), model, tensors, judged, traces, asked)


def _made(pair: Pair) -> list[list[int]]:
    return prompts.built_in(read_config(Path(pair.target)).vocab_size)


def _bench(backend: Backend, device: torch.device, dtype: torch.dtype) -> Bench:
    activations = torch.float32 if backend.capabilities.wide_activations else dtype
    return Bench(backend, device, dtype, activations, choose_block_size(None, backend.capabilities))


def _by_kind(steps: dict[str, Tensors]) -> dict[str, Tensors]:
    """step -> layer -> numbers, as one section per layer and one for the logits."""
    sections: dict[str, Tensors] = {}
    for step, outputs in steps.items():
        for name, tensor in outputs.items():
            sections.setdefault(name, {})[step] = tensor
    return sections


def _models(options: Options, scratch: Path) -> tuple[Model, Pair]:
    """The models, and how to recognise them on another machine."""
    if options.model is None:
        written = checkpoints.write_checkpoints(scratch)
        flat = {f"{model} {name}": tensor for model, own in written.items() for name, tensor in own.items()}
        return Model(numbers.digest(flat)), pair_of(scratch)
    target = catalogue.resolve_model(options.model)
    drafts: dict[str, str | None] = {"ngram": None}
    paths = [target]
    if options.draft is not None:
        draft = catalogue.resolve_draft(options.draft)
        drafts[options.drafter] = str(draft)
        paths.append(draft)
    drafter = None if options.draft is None else options.drafter
    model = Model(" ".join(map(_file_digest, paths)), options.model, drafter, options.draft)
    return model, Pair(str(target), drafts)


def _file_digest(path: Path) -> str:
    """Of the weight files of a model."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    seen = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            seen.update(hashlib.file_digest(handle, "sha256").digest())
    return seen.hexdigest()


def _about(backend: Backend, device: torch.device, dtype: str) -> dict[str, str]:
    return {
        "device": backend.describe(device),
        "dtype": dtype,
        "activations": "float32" if backend.capabilities.wide_activations else dtype,
        "date": time.strftime("%Y-%m-%d"),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
