"""How children ended, in words: also those that a signal without a name has ended, whoever started them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from ssd_ascend.core.exit_status import how_it_ended
from ssd_ascend.distributed.launch import Children, Meeting
from ssd_ascend.speculation.supervisor import _exit_reason

NAMELESS = signal.SIGRTMIN + 1


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0"),
        (7, "exited with status 7"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-NAMELESS, f"was killed by signal {NAMELESS:d}"),
    ],
)
def test_a_status_in_words(status: int, words: str) -> None:
    assert how_it_ended(status) == words


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a nameless signal ends."""
    with subprocess.Popen(["sleep", "600"]) as found:
        found.send_signal(NAMELESS)
        yield found
        found.kill()


def test_of_a_draft_worker(child: subprocess.Popen[bytes]) -> None:
    words = f"the draft worker (process {child.pid}) was killed by signal {NAMELESS:d}"
    assert _exit_reason(child, patience_s=60.0) == words


def test_of_a_rank(child: subprocess.Popen[bytes]) -> None:
    children = Children("nowhere:nothing", {}, 1, Meeting("", "", 0, ""))
    children._processes[1] = child
    child.wait(60.0)
    assert children.fate(1) == f"(process {child.pid}) was killed by signal {NAMELESS:d}"
