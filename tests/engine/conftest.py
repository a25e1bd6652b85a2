"""One pair of tiny models per family, written once for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import FAMILIES, write_pair


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> its pair."""
    root = tmp_path_factory.mktemp("pairs")
    return {family: write_pair(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def pair(pairs: dict[str, Path]) -> Path:
    """The llama pair."""
    return pairs["llama"]
