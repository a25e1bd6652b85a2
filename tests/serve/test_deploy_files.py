"""The unit and the container file in `deploy/` start a server that exists, with flags it takes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_ascend.engine.async_engine import _GOODBYE_S
from ssd_ascend.engine.process_link import _DEATH_S
from ssd_ascend.flags import add_engine_arguments
from ssd_ascend.serve.arguments import parse_arguments, server_config
from ssd_ascend.serve.server import _LAST_WORDS_S

ROOT = Path(__file__).resolve().parents[2]
UNIT = (ROOT / "deploy" / "ssd-ascend.service").read_text("utf-8")
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text("utf-8")
VERIFY = shutil.which("systemd-analyze")


def started(words: list[str]) -> list[str]:
    """The flags of a command that starts the server."""
    assert words[:3] == [words[0], "-m", "ssd_ascend.serve"]
    return words[3:]


def test_the_container_starts_a_server_that_drains_when_told() -> None:
    lines = {name: json.loads(words) for name, words in re.findall(r"^(ENTRYPOINT|CMD) (.*)$", CONTAINER, re.M)}
    args = parse_arguments([*started(lines["ENTRYPOINT"]), *lines["CMD"]], add_engine_arguments)
    assert (server_config(args).host, args.model) == ("0.0.0.0", "smollm2-135m-eagle3")
    assert re.search(r"^USER \d+$", CONTAINER, re.M)  # not root


def test_nothing_of_this_machine_goes_into_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {".git", ".venv*", ".scratch"} <= set(ignored)


def test_the_unit_outlasts_a_drain() -> None:
    (command,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.M)
    flags = started(shlex.split(command))
    assert flags == ["--config", "/etc/ssd-ascend/server.toml"]
    args = parse_arguments(["--config", str(ROOT / "deploy" / "server.toml")], add_engine_arguments)
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)
    worst = server_config(args).drain_s + _LAST_WORDS_S + _GOODBYE_S + _DEATH_S
    assert int(patience) > worst
    (container,) = re.findall(r"podman run --stop-timeout (\d+) ", CONTAINER)  # which has ten seconds otherwise
    assert int(container) > worst


@pytest.mark.skipif(VERIFY is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    assert VERIFY is not None
    unit = tmp_path / "ssd-ascend.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT, flags=re.M))
    ran = subprocess.run([VERIFY, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
