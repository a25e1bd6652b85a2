"""Target and remote speculator on two "hosts", network namespaces with a cable of their own, which is then cut.

Skipped where the system does not let us make namespaces.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.two_hosts import PORT, SPECULATOR, TARGET, THERE, cut, mend, running, told, two_hosts, until_hits_grow

STREAMS, CUT_S, BACK_S = 16, 5.0, 5.0
FLAGS = ["--dtype", "float32", "--speculator", "ssd", "--drafter", "model", "--lookahead", "4", "--fan-out", "2"]


@pytest.mark.slow
def test_a_cut_cable_costs_speed_only(pair: Path) -> None:
    """5 s without a cable under 16 streams: nothing fails, tokens stay, and hits are back within 5 s."""
    flags = ["--model", str(pair / "target"), "--draft", str(pair / "model"), *FLAGS]
    where, address = ["--host", THERE, "--port", str(PORT)], f"{THERE}:{PORT}"
    with two_hosts(), running(SPECULATOR, "-m", "ssd_ascend.speculate", *flags, *where) as speculator:
        assert speculator.stdout is not None
        assert speculator.stdout.readline().startswith("ready")
        words = ["-m", "tests.engine.remote_target", str(pair), address, str(STREAMS), "45"]
        with running(TARGET, *words) as target:
            until_hits_grow(target)
            cut()
            began = time.monotonic()
            report = told(target)
            while time.monotonic() < began + CUT_S:
                last, report = report, told(target)
                assert report["steps"] > last["steps"], "the target stands still without its speculator"
            mend()
            mended = time.monotonic()
            back = until_hits_grow(target, after=mended)
            print(f"speculation came back {back['time'] - mended:.2f} s after the cable")
            assert back["time"] - mended < BACK_S
            while "right" not in (report := told(target)):
                pass
            assert report["right"]
            assert target.wait(60) == 0
