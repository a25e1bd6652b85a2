"""One pair of tiny models per family, written once for all engine tests.

What is imported here at the top is imported before `--device` is read, where a path below this folder is given.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> its pair."""
    from tests.engine.harness import FAMILIES, write_pair

    root = tmp_path_factory.mktemp("pairs")
    return {family: write_pair(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def pair(pairs: dict[str, Path]) -> Path:
    """The llama pair."""
    return pairs["llama"]
