"""A run's folder: what it was begun with, its text, its log, and the checkpoint it can be taken up from.

Everything is written beside its place and then renamed, so that a full disk or a killed process costs the last interval
and never the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ssd_ascend.config.training import Run
from ssd_ascend.errors import ConfigError

RUN, TEXT, LOG, CHECKPOINT = "run.json", "text.safetensors", "log.json", "checkpoint.safetensors"


class RunFolder:
    """The files of one run, in the folder `run` of its output directory."""

    def __init__(self, out: Path, run: Run) -> None:
        """Begin, or find what was begun. ConfigError when the folder belongs to another run, or holds other things."""
        self.out = out
        self.path = out / "run"
        if out.exists() and not out.is_dir():
            raise ConfigError(f"{out} is a file", remedy="give --out a directory")
        file = self.path / RUN
        if file.is_file():
            self._compare(file, run)
            return
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"{out} is not empty and holds no run", remedy="give --out a new directory")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(run.to_dict(), indent=1))

    @staticmethod
    def _compare(file: Path, run: Run) -> None:
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is not readable: {error}", remedy="give --out a new directory") from error
        if changes := run.differences(kept):
            raise ConfigError(
                f"{file.parent.parent} holds another run: {'; '.join(changes[:4])}",
                remedy="give the same settings to go on with it, or another --out",
            )

    @property
    def text(self) -> Path:
        """Where the training text is kept."""
        return self.path / TEXT

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], log: list[dict[str, Any]]) -> None:
        """Keep a checkpoint after `step` steps."""
        part = self.path / f"{CHECKPOINT}.part"
        with writing(part):
            plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(plain, part, metadata={"step": str(step), "log": json.dumps(log)})
            part.replace(self.path / CHECKPOINT)

    def load(self) -> tuple[int, dict[str, torch.Tensor], list[dict[str, Any]]] | None:
        """(steps done, tensors, log) of the last checkpoint, None when there is none."""
        file = self.path / CHECKPOINT
        if not file.is_file():
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata()
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  no mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", remedy="delete it to start over") from error
        return int(metadata["step"]), tensors, json.loads(metadata["log"])


class writing:  # noqa: N801  reads as a statement: with writing(file): ...
    """Turns a failed write (a full disk, no permission) into one sentence; what was there before still is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | SafetensorError):
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"cannot write {self._path}: {reason}",
                remedy="make room, or give another --out; the last checkpoint is intact, and the same command goes on",
            ) from error


def replace_text(file: Path, text: str) -> None:
    """Write a text file that appears only when it is complete."""
    part = file.with_name(f"{file.name}.part")
    with writing(file):
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(file)
