"""Schemathesis makes requests up from our own OpenAPI description: none may break the server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.live import LiveServer

pytestmark = pytest.mark.slow


def test_schemathesis_finds_no_server_error(server: LiveServer, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--max-examples", "60", "--seed", "1", "--workers", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    made = re.search(r"(\d+) generated", ran.stdout)
    assert made is not None, ran.stdout[-2000:]
    print(ran.stdout[-800:])
    assert int(made[1]) > 400
    server.wait_until_idle()
