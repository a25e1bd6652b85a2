"""Ranks that never become a group: rank 0 says why, in seconds, also while the library waits for them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import distributed

from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.model import model_config_from_hf
from ssd_ascend.distributed.launch import Children, Meeting, lead
from ssd_ascend.engine import gather
from ssd_ascend.errors import ConfigError, WorkerError
from tests.engine.harness import DEVICE
from tests.toys import llama_config

ROOT = Path(__file__).parents[2]
LIBRARY_S = 300.0
"""How long the library below waits: whoever waits with it fails, however slow the machine is."""


_OVER = threading.Event()
"""Of the module: a library is registered once."""


@pytest.fixture
def waiting_library() -> Iterator[str]:
    """A library whose groups never come about, and whose waiting nothing ends but this test."""
    name = "waiting"

    def create(*_: object) -> NoReturn:
        _OVER.wait(LIBRARY_S)
        raise RuntimeError("nobody came")

    if name not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(name, create, devices=["cpu"])
    _OVER.clear()
    yield name
    _OVER.set()
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("entry", "size", "why"),
    [
        ("without_a_device", 4, "rank 3 failed: there is no device 3"),
        ("killed_while_joining", 2, r"rank 1 \(process \d+\) was killed by SIGKILL"),
    ],
)
def test_a_rank_that_does_not_join_ends_the_waiting(waiting_library: str, entry: str, size: int, why: str) -> None:
    with pytest.raises(WorkerError, match=why):
        lead(
            waiting_library, torch.device("cpu"), size,
            entry=f"tests.engine.ranks_that_fail:{entry}", config={}, place=None,
        )  # fmt: skip


def test_a_mistake_of_ours_reaches_rank_0_and_leaves_its_trace(
    waiting_library: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not only errors that are expected: rank 0 has the kind and the sentence, the rank's own log where it was."""
    with pytest.raises(WorkerError, match=re.escape("rank 1 failed: TypeError: 'this' was not (its own message")):
        lead(
            waiting_library, torch.device("cpu"), 2,
            entry="tests.engine.ranks_that_fail:with_a_mistake", config={}, place=None,
        )  # fmt: skip
    log = capfd.readouterr().err
    assert "rank 1 of 2 leaves: TypeError: 'this' was not" in log
    assert "in open_backend" in log


class Held:
    """A process whose driver does not let go of it, whatever is done to it."""

    pid = 4242

    def __init__(self) -> None:
        self.killed = False

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            raise AssertionError("this wait never ends")
        raise subprocess.TimeoutExpired("rank", timeout)

    def poll(self) -> None:
        """It has not ended."""

    def kill(self) -> None:
        self.killed = True


def test_a_rank_that_the_system_holds_beyond_its_death_is_left_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    children = Children("none:none", {}, 1, Meeting("", "", 0, ""))
    held = Held()
    children._processes[1] = held  # type: ignore[assignment]
    children.close()
    assert held.killed
    assert [record.message for record in caplog.records] == [
        "process 4242 of a rank was killed, and is held by the system: it is left to itself"
    ]


@pytest.mark.skipif(DEVICE == "npu", reason="its library meets at the first collective, not before")
def test_a_rank_that_is_killed_inside_the_real_library() -> None:
    """As above, with the library of this device; and the process that led can end, whatever still waits in it."""
    program = (
        "from ssd_ascend.backends.registry import load_backend\n"
        "from ssd_ascend.distributed.launch import lead\n"
        "from ssd_ascend.errors import WorkerError\n"
        f"backend, entry = load_backend({DEVICE!r}), 'tests.engine.ranks_that_fail:killed_while_joining'\n"
        "try:\n"
        "    lead(backend.collective, backend.device(0), 2, entry=entry, config={}, place=None)\n"
        "except WorkerError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=LIBRARY_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.match(r"rank 1 \(process \d+\) was killed by SIGKILL", done.stdout)


def test_more_ranks_than_devices_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend itself says what there is."""

    class TwoDevices:
        capabilities = load_backend("cpu").capabilities
        collective = "none"

        def num_devices(self) -> int:
            return 2

        def device(self, index: int) -> torch.device:
            if index >= 2:
                raise ConfigError(f"there is no device {index}: this machine has 2")
            return torch.device("cpu")

    def start(*_: object, **__: object) -> NoReturn:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(gather, "lead", start)
    backend: Backend = TwoDevices()  # type: ignore[assignment]
    model = model_config_from_hf(llama_config(), where="x")
    with pytest.raises(ConfigError, match="there is no device 3: this machine has 2"):
        gather.gather_ranks(EngineConfig(model="x", tensor_parallel=4), backend, model)
    with pytest.raises(AssertionError, match="ranks were started"):
        gather.gather_ranks(EngineConfig(model="x", tensor_parallel=2), backend, model)
