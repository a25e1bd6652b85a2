"""What the NPU backend says of itself, of chips, and of what is missing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssd_ascend.backends.base import AttentionSpec, Backend, StoppingBackend
from ssd_ascend.backends.npu import emulator, environment
from ssd_ascend.backends.npu.emulator.build import build
from ssd_ascend.backends.npu.soc import SOCS, find_soc
from ssd_ascend.errors import ConfigError
from tests.engine.harness import make_engine, speculation, write_pair

ROOT = Path(__file__).resolve().parents[2]


def test_says_that_it_is_emulated(backend: Backend) -> None:
    assert emulator.is_loaded()
    assert backend.describe(backend.device(0)) == "npu: Ascend910_9392, Atlas A3 (910C) (emulated)"


def test_fresh_memory_is_rubbish(backend: Backend) -> None:
    """Who reads what nobody wrote must see it."""
    device = backend.device(0)
    torch.npu.empty_cache()  # what torch keeps has been written to
    fresh = torch.empty(1 << 25, dtype=torch.float16, device=device)
    assert torch.isnan(fresh).all()


def test_a_pinned_buffer_that_is_overwritten_too_early_shows(backend: Backend) -> None:
    """Copies are queued, as on hardware: the backend's own must be guarded by events."""
    device = backend.device(0)
    pinned = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    arrived = torch.empty(4, dtype=torch.int64, device=device)
    held = torch.npu.ExternalEvent()
    held.wait(torch.npu.current_stream())  # whoever is slow, the copy comes after
    arrived.copy_(pinned, non_blocking=True)
    pinned.fill_(7)
    held.record(torch.npu.Stream(device))
    assert arrived.tolist() == [7, 7, 7, 7]


def test_devices_are_apart(backend: Backend) -> None:
    first, second = backend.device(0), backend.device(1)
    x = torch.arange(8, device=second)
    assert x.device == second
    assert torch.equal(x.to(first).cpu(), torch.arange(8))
    backend.device(0)
    with pytest.raises(ConfigError, match="there is no NPU 99"):
        backend.device(99)


def test_attention_refuses_what_the_operator_would(backend: Backend) -> None:
    device = backend.device(0)
    for spec in (
        AttentionSpec(1, 4, 2, 64, 64, torch.float16, 0.1),
        AttentionSpec(1, 4, 2, 512, 128, torch.float16, 0.1),
    ):
        with pytest.raises(ConfigError):
            backend.attention(spec, device)


@pytest.mark.parametrize("version", [220, 225, 250, 255, 260])
def test_chips_that_serve(version: int) -> None:
    assert find_soc(version).refusal is None


@pytest.mark.parametrize(("version", "words"), [(200, "310P"), (205, "310P"), (104, "not known"), (230, "not known")])
def test_chips_that_do_not(version: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_soc(version)


def test_generations_do_not_overlap() -> None:
    versions = [version for soc in SOCS for version in soc.versions]
    assert len(versions) == len(set(versions))


@pytest.mark.parametrize("name", list(environment.FORBIDDEN))
def test_settings_that_cannot_work_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, environment.FORBIDDEN[name][0])
    with pytest.raises(ConfigError, match=name):
        environment.apply(emulated=True)


def test_more_than_sixteen_verify_tokens_are_refused(backend: Backend, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "llama")
    with pytest.raises(ConfigError, match="at most 16 tokens a row"):
        make_engine(pair, speculation(pair, "sd", lookahead=16), device="npu", dtype="float16")


def test_a_missing_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        build(tmp_path, tmp_path, tmp_path, "torch")


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    """Without CANN's headers nothing compiles; the next attempt must start afresh."""
    with pytest.raises(ConfigError, match="does not compile"):
        build(tmp_path / "cache", tmp_path, tmp_path, "torch")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


ASK = """
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.errors import ConfigError
try:
    load_backend("npu")
except ConfigError as error:
    print(error)
"""


def test_without_npu_and_emulator_one_sentence_says_what_to_do() -> None:
    """torch_npu is there and CANN is not: no page of words from the dynamic linker."""
    names = ("SSD_", "ASCEND_", "TORCH_", "TASK_")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=300, check=True)
    (sentence,) = done.stdout.splitlines()
    assert "CANN toolkit is missing" in sentence
    assert "SSD_NPU_EMULATOR=1" in sentence


def test_the_server_says_so_before_it_asks_for_a_model() -> None:
    names = ("SSD_", "ASCEND_", "TORCH_", "TASK_")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "-m", "ssd_ascend.serve"]
    environment = bare | {"SSD_DEVICE": "npu", "SSD_LOG_LEVEL": "WARNING"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("ssd_ascend.serve: torch_npu does not load, so the CANN toolkit is missing")
    assert "SSD_NPU_EMULATOR=1" in sentence


def test_a_stop_that_cannot_be_asked_for_is_a_runtime_error(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls it when a rank is lost goes on to end the group: it must not leave him otherwise."""
    assert isinstance(backend, StoppingBackend)

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(RuntimeError, match=r"NPU 0 goes on waiting: libascendcl.so: cannot open shared object file"):
        backend.stop(backend.device(0))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # an older CANN
    with pytest.raises(RuntimeError, match=r"NPU 0 goes on waiting: .*'aclrtDeviceTaskAbort'"):
        backend.stop(backend.device(0))
