"""`python -m bench.metronome_server`: the real server door around `bench/metronome.py`."""

from __future__ import annotations

import sys

from ssd_ascend.serve.__main__ import main

if __name__ == "__main__":
    sys.exit(main(engine_command=(sys.executable, "-m", "bench.metronome")))
