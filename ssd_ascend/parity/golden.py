"""A golden run as a value and as a folder: `golden.json` says what was done and holds the whole numbers,
`golden.safetensors` the others.

Damage and other suites are errors with a reason: a comparison against the wrong thing would look like a verdict.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from ssd_ascend.errors import ConfigError
from ssd_ascend.parity.engines import Trace
from ssd_ascend.parity.ops import Tensors

FORMAT, FORMAT_ASKING = "ssd_ascend golden run 1", "ssd_ascend golden run 2"
"""Change when the suite changes, so that no run is held to numbers of another suite. The second brings its prompts."""
_ABOUT, _NUMBERS = "golden.json", "golden.safetensors"
_MOST_BYTES = 20 << 20
_BETWEEN = "/"


@dataclass(frozen=True, slots=True)
class Model:
    """What was run besides the operators. weights: a fingerprint; source: what `--model` said, None for our own."""

    weights: str
    source: str | None = None
    drafter: str | None = None
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class Golden:
    """One recorded run. about: device, dtype, versions, date. tensors: section -> name -> output. prompts: of the
    engines, None for those that every version makes by itself."""

    about: dict[str, str]
    model: Model
    tensors: dict[str, Tensors]
    verdicts: dict[str, list[list[int]]]
    traces: dict[str, list[Trace]]
    prompts: list[list[int]] | None = None

    @property
    def dtype(self) -> str:
        """Of the weights, as flags name it."""
        return self.about["dtype"]


def save_golden(golden: Golden, folder: Path) -> int:
    """Write a golden run; returns its bytes. ConfigError when it is too large to be mailed."""
    flat = {
        f"{section}{_BETWEEN}{name}": tensor.contiguous()
        for section, tensors in golden.tensors.items()
        for name, tensor in tensors.items()
    }
    numbers = save(flat)
    about: dict[str, Any] = {
        "format": FORMAT if golden.prompts is None else FORMAT_ASKING,
        "about": golden.about,
        "model": asdict(golden.model),
        "sections": list(golden.tensors),
        "numbers_sha256": hashlib.sha256(numbers).hexdigest(),
        "verdicts": golden.verdicts,
        "traces": {name: [asdict(trace) for trace in traces] for name, traces in golden.traces.items()},
    }
    if golden.prompts is not None:
        about["prompts"] = golden.prompts
    text = json.dumps(about | {"sha256": _fingerprint(about)}, indent=1)
    size = len(numbers) + len(text)
    if size > _MOST_BYTES:
        raise ConfigError(
            f"the golden run has {size / 1e6:.0f} MB, too much to be mailed", remedy="take a smaller model"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NUMBERS).write_bytes(numbers)
    (folder / _ABOUT).write_text(text + "\n", encoding="utf-8")
    return size


def load_golden(folder: Path) -> Golden:
    """Read a golden run. ConfigError says what is wrong with it."""
    again = "record it again, or copy both files once more"
    try:
        data: Any = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        numbers = (folder / _NUMBERS).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"no golden run in {folder}: {error.strerror}", remedy="give a folder that `record` wrote"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{folder / _ABOUT} is damaged: {error}", remedy=again) from error
    if not isinstance(data, dict) or data.get("format") not in (FORMAT, FORMAT_ASKING):
        found = data.get("format") if isinstance(data, dict) else None
        raise ConfigError(
            f"{folder} holds {found!r}, and this version checks {FORMAT!r} and {FORMAT_ASKING!r}",
            remedy="record and check with the same version of ssd_ascend",
        )
    said = data.pop("sha256", None)
    if said != _fingerprint(data):
        raise ConfigError(f"{folder / _ABOUT} was changed after it was recorded", remedy=again)
    if hashlib.sha256(numbers).hexdigest() != data["numbers_sha256"]:
        raise ConfigError(f"{folder / _NUMBERS} is damaged, or belongs to another run", remedy=again)
    return _golden(data, load(numbers))


def _golden(data: dict[str, Any], flat: dict[str, torch.Tensor]) -> Golden:
    tensors: dict[str, Tensors] = {section: {} for section in data["sections"]}
    for name, tensor in flat.items():
        section, _, rest = name.partition(_BETWEEN)
        tensors[section][rest] = tensor
    traces = {
        name: [
            Trace(trace["tokens"], [(t, m) for t, m in trace["rivals"]], [(a, b, c) for a, b, c in trace["steps"]])
            for trace in own
        ]
        for name, own in data["traces"].items()
    }
    return Golden(data["about"], Model(**data["model"]), tensors, data["verdicts"], traces, data.get("prompts"))


def _fingerprint(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
