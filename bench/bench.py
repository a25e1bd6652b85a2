"""`python bench/bench.py ...`: our engine in its modes, against itself, against transformers, or any OpenAI server.

Works from anywhere, as the reference's script of this name does; `--help` says what it takes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, where `bench` would mean this file
    from bench.command import main

    sys.exit(main())
