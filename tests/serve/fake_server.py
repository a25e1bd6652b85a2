"""`python -m tests.serve.fake_server`: the real server door around the scripted engine."""

from __future__ import annotations

import sys

from ssd_ascend.serve.__main__ import main

if __name__ == "__main__":
    sys.exit(main(engine_command=(sys.executable, "-m", "tests.serve.fake_engine")))
