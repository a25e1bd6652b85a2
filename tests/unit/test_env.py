"""The environment is read when asked, typed, and never shown where it is secret."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_ascend import env
from ssd_ascend.errors import ConfigError

README = Path(__file__).resolve().parents[2] / "README.md"


def test_nothing_set_means_nothing_chosen() -> None:
    assert (env.device(), env.target_model(), env.draft_model(), env.hf_cache(), env.api_key()) == (None,) * 5
    assert env.dataset_dir() is None
    assert env.log_level() == "INFO"
    assert env.npu_emulator() is False
    assert env.report() == {}


def test_values_are_typed_and_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_DEVICE", " CPU ")
    monkeypatch.setenv("SSD_HF_CACHE", "~/hub")
    monkeypatch.setenv("SSD_LOG_LEVEL", "debug")
    assert env.device() == "cpu"
    assert env.hf_cache() == Path.home() / "hub"
    assert env.log_level() == "DEBUG"
    monkeypatch.setenv("SSD_DEVICE", "")
    assert env.device() is None


@pytest.mark.parametrize(("value", "meaning"), [("1", True), ("on", True), ("0", False), ("FALSE", False), ("", False)])
def test_switches(value: str, meaning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_NPU_EMULATOR", value)
    assert env.npu_emulator() is meaning


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("SSD_NPU_EMULATOR", "2", env.npu_emulator),
        ("SSD_LOG_LEVEL", "LOUD", env.log_level),
        ("SSD_LOG_FORMAT", "xml", env.log_format),
    ],
)
def test_a_wrong_value_names_variable_and_value(
    name: str, value: str, read: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert callable(read)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        read()


def test_the_report_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_API_KEY", "hush")
    monkeypatch.setenv("SSD_TARGET_MODEL", "smollm2-135m")
    assert env.report() == {"SSD_API_KEY": "(set)", "SSD_TARGET_MODEL": "smollm2-135m"}
    assert env.is_set("SSD_API_KEY")
    assert not env.is_set("SSD_DEVICE")


def test_every_variable_that_is_read_is_told_of() -> None:
    assert set(re.findall(r"SSD_[A-Z_]+", Path(env.__file__).read_text("utf-8"))) == {v.name for v in env.VARIABLES}


def test_what_is_handed_down_beats_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_LOG_FORMAT", "json")
    env.provide({"SSD_LOG_FORMAT": "text"})
    assert env.child({})["SSD_LOG_FORMAT"] == env.log_format() == "json"
    env.hand_down({"SSD_LOG_FORMAT": "text"})
    assert env.child({})["SSD_LOG_FORMAT"] == env.log_format() == "text"


def test_the_readme_lists_every_variable() -> None:
    text = README.read_text(encoding="utf-8")
    assert [variable.name for variable in env.VARIABLES if f"`{variable.name}`" not in text] == []


def run_logging(code: str, level: str) -> subprocess.CompletedProcess[str]:
    """Log in a fresh interpreter, where no test runner owns the root logger."""
    command = [sys.executable, "-c", f"from ssd_ascend.log import fields, get_logger\n{code}"]
    environment = {"SSD_LOG_LEVEL": level, "PYTHONPATH": str(README.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_logs_go_to_standard_error_at_the_level_asked_for() -> None:
    code = (
        "log = get_logger('ssd_ascend.x')\nlog.info('loaded %s', fields(seconds=1.23456, name='a b'))\nlog.debug('no')"
    )
    done = run_logging(code, "INFO")
    assert done.stdout == ""
    assert done.stderr.endswith("I ssd_ascend.x: loaded seconds=1.235 name='a b'\n")
    assert done.stderr.count("\n") == 1
    assert run_logging(code, "WARNING").stderr == ""


def test_a_wrong_level_is_a_line_of_the_log_and_no_traceback() -> None:
    said = run_logging("get_logger('ssd_ascend.x').info('on')", "LOUD").stderr.splitlines()
    assert len(said) == 2
    assert said[0].endswith(
        "W ssd_ascend: SSD_LOG_LEVEL='LOUD' is not a log level (use one of DEBUG, INFO, WARNING, ERROR)"
    )
    assert said[1].endswith("I ssd_ascend.x: on")
