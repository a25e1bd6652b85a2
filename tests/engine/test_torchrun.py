"""Ranks that `torchrun` starts: the first one answers as one process does, the others follow and leave with it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import write_pair
from tests.unit.text_toys import byte_level_backend, write_directory

ROOT = Path(__file__).parents[2]


def answer(launcher: list[str], model: Path, *more: str) -> dict[str, Any]:
    """What `generate --json` prints, and that every process ended well."""
    flags = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--max-model-len", "256", *more]
    asked = ["--prompt", "the end of the ", "--max-tokens", "24", "--temperature", "0", "--json"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "ssd_ascend.generate", *flags, *asked],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, "one rank answers"
    found: dict[str, Any] = json.loads(lines[0])
    return found


@pytest.mark.slow
def test_two_ranks_of_torchrun_answer_as_one_process(tmp_path: Path) -> None:
    backend = byte_level_backend()
    target = write_pair(tmp_path, "llama", vocab=backend.get_vocab_size()) / "target"
    write_directory(target, backend, eos_token="</s>")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    alone = answer([], target)
    assert answer(launcher, target, "--tp", "2")["token_ids"] == alone["token_ids"]
    assert len(alone["token_ids"]) > 4
