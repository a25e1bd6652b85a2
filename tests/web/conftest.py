"""The page in a real browser, in the lane of `scripts/web_lane.sh`; elsewhere there is no driver, and it is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import parrot_directory
from tests.serve.live import LiveServer

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
"""Root has no sandbox; and a browser that looks for updates slows the tests."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = parrot_directory(tmp_path_factory.mktemp("models") / "parrot")
    with LiveServer("--model", str(model), "--served-model-name", "parrot") as live:
        yield live.wait_until_ready()
        assert live.stop() == 0


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()
