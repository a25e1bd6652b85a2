"""The doctor looks, changes nothing, and says what to type."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ssd_ascend import cli, doctor
from ssd_ascend.doctor import Device, Report

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
IMPORT_NAMES = {"prometheus-client": "prometheus_client"}


def report(*, usable: bool = True, missing: dict[str, str] | None = None) -> Report:
    return Report(
        python="3.11.7",
        platform="Linux x86_64",
        versions={"torch": "2.13.0", "triton": None},
        devices=(
            Device(name="cpu", found=True, usable=usable, detail="2 cores"),
            Device(name="npu", found=True, usable=False, detail="8 chips", remedy="pip install x"),
        ),
        compiler=None,
        embedded_model=None,
        environment={"SSD_API_KEY": "(set)"},
        missing=missing or {},
    )


def test_what_a_cpu_can_do_is_read_from_the_kernel() -> None:
    x86 = "processor : 0\nflags\t\t: fpu sse2 avx2 fma avx512_bf16\nflags\t\t: fpu\n"
    arm = "Features\t: fp asimd sve bf16\n"
    assert doctor.isa_flags(x86) == ("avx2", "fma", "avx512_bf16")
    assert doctor.isa_flags(arm) == ("asimd", "sve", "bf16")
    assert doctor.isa_flags("") == ()
    assert doctor.memory_bytes("MemTotal:  100 kB\nMemAvailable:   40 kB\n") == (40960, 102400)
    assert doctor.memory_bytes("") == (0, 0)


def test_the_extras_are_those_of_pyproject() -> None:
    declared = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, modules in doctor.EXTRAS.items():
        names = [line.split(";")[0].split(">")[0].strip() for line in declared[extra] if "[" not in line]
        assert sorted(IMPORT_NAMES.get(name, name) for name in names) == sorted(modules), extra


def test_the_verdict_needs_a_device_and_the_core_packages() -> None:
    assert report().can_serve
    assert not report(usable=False).can_serve
    assert not report(missing={"torch": "pip install torch"}).can_serve
    assert report(missing={"extra 'serve'": "pip install y"}).can_serve


@pytest.mark.parametrize(("device", "ready"), [("cpu", True), ("npu", False), ("tpu", False)])
def test_the_verdict_is_about_the_device_that_the_environment_asks_for(device: str, ready: bool) -> None:
    asked = dataclasses.replace(report(), environment={"SSD_DEVICE": device})
    assert asked.can_serve is ready
    *_, (_, _, verdict) = doctor.rows(asked)
    assert verdict == (
        "ready: can serve on cpu" if ready else f"cannot serve on {device}, which SSD_DEVICE asks for, yet"
    )


def test_the_table_shows_marks_remedies_and_commands() -> None:
    lines = doctor.render(doctor.rows(report(missing={"extra 'serve'": "pip install y"}))).splitlines()
    squeezed = [" ".join(line.split()) for line in lines]
    assert "-- triton not installed" in squeezed
    assert "!! device npu 8 chips" in squeezed
    assert squeezed[squeezed.index("!! device npu 8 chips") + 1] == "pip install x"
    assert "!! missing extra 'serve' pip install y" in squeezed
    assert squeezed[-1] == "ok verdict ready: can serve on cpu"


def test_a_package_that_is_absent_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_module", lambda name: name not in ("msgspec", "torch_npu", "triton"))
    alone = doctor.missing_packages([Device(name="npu", found=False, usable=False, detail="")])
    assert list(alone) == ["extra 'serve'"]
    assert alone["extra 'serve'"].endswith(f"-m pip install -e '{PYPROJECT.parent}[serve]'")
    beside_a_chip = doctor.missing_packages([Device(name="npu", found=True, usable=False, detail="")])
    assert list(beside_a_chip) == ["extra 'serve'", "extra 'npu'"]


def test_this_machine_is_examined_and_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["can_serve"] is True
    assert {device["name"]: device["usable"] for device in shown["devices"]}["cpu"] is True
    assert set(shown) == {field.name for field in dataclasses.fields(Report)} | {"can_serve"}


def test_the_status_says_when_nothing_can_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "backends", lambda: ())
    assert doctor.main([]) == 1
    assert "cannot serve on any device yet" in capsys.readouterr().out


def test_the_command_is_the_module() -> None:
    command = [sys.executable, "-m", "ssd_ascend", "doctor", "--help"]
    done = subprocess.run(command, cwd=PYPROJECT.parent, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ssd-ascend doctor")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--help"], 0, "usage: ssd-ascend COMMAND"),
        ([], 2, "usage: ssd-ascend COMMAND"),
        (["docter"], 2, "did you mean 'doctor'?"),
    ],
)
def test_the_command_line_without_a_door(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    assert says in captured.out + captured.err


def test_a_door_that_is_not_built_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "available", lambda: {"doctor": ""})
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err == "ssd-ascend: 'serve' is not part of this installation\n"
