"""The CPU's compiled kernels: their build, what happens without one, and the machine they run on."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ssd_ascend.backends.cpu import machine, native
from ssd_ascend.backends.cpu.attention import PlainAttention
from ssd_ascend.backends.cpu.backend import CpuBackend
from ssd_ascend.backends.cpu.native import build, library
from ssd_ascend.backends.cpu.native.ops import NativeOps
from ssd_ascend.backends.cpu.ops import PlainOps
from tests.backends.conformance import close, expected, make_case, run_case, spec_of

needs_kernels = pytest.mark.skipif(native.load() is None, reason="no C++ compiler here")


def compiler(folder: Path, script: str) -> str:
    path = folder / "fake-g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_no_compiler_is_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library.load_from(tmp_path, compilers=("no-such-compiler",)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no-such-compiler" in caplog.text


def test_failing_compiler_is_named_with_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = compiler(tmp_path, "echo 'x.cpp:1: error: bad moon' >&2; exit 1")
    assert library.load_from(tmp_path / "cache", compilers=(broken,)) is None
    assert "bad moon" in caplog.text
    assert len(caplog.records) == 1
    assert not list((tmp_path / "cache").glob("*.so"))


def test_compiler_that_writes_nonsense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It exits with 0, but what it left is no library."""
    liar = compiler(tmp_path, 'while [ "$1" != -o ]; do [ $# -gt 0 ] || exit 0; shift; done; echo junk > "$2"')
    assert library.load_from(tmp_path / "cache", compilers=(liar,)) is None
    assert "plain torch" in caplog.text


def test_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert library.load_from(tmp_path / "file" / "cache") is None
    assert "plain torch" in caplog.text


def test_backend_answers_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CPU_KERNELS", "0")
    backend = CpuBackend()
    assert type(backend.ops) is PlainOps
    assert not backend.capabilities.row_invariant
    case = make_case(spec_of(4, 2, 64, 16, torch.float32), ((3, 20), (1, 5)))
    close(run_case(backend, case), expected(case), torch.float32)
    monkeypatch.delenv("SSD_CPU_KERNELS")
    assert library.load() is native.load(), "switched on again, and built once"


@needs_kernels
def test_two_processes_build_once(tmp_path: Path) -> None:
    """Both start at the same time on an empty cache; one compiles, both get a library that works."""
    code = (
        "import logging, torch; logging.basicConfig(level=logging.INFO)\n"
        "from ssd_ascend.backends.cpu import native\n"
        "from ssd_ascend.backends.cpu.native.ops import NativeOps\n"
        "ops = NativeOps(native.load())\n"
        "assert torch.equal(ops.linear(torch.eye(3), None)(torch.ones(1, 3)), torch.ones(1, 3))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    messages = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], messages
    assert "".join(messages).count("compiled the CPU kernels") == 1
    assert len(list(tmp_path.rglob("*.so"))) == 1


@needs_kernels
def test_kernels_work_in_a_forked_child() -> None:
    """The pool's threads do not survive a fork; a child that waited for them would hang."""
    code = (
        "import os, torch; torch.set_num_threads(2)\n"
        "from ssd_ascend.backends.cpu import native\n"
        "from ssd_ascend.backends.cpu.native.ops import NativeOps\n"
        "x = torch.randn(8, 512); linear = NativeOps(native.load()).linear(torch.randn(512, 512), None)\n"
        "before = linear(x)\n"
        "if (child := os.fork()) == 0: os._exit(0 if linear(x).tolist() == before.tolist() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@needs_kernels
def test_threads_do_not_change_a_bit() -> None:
    linear = CpuBackend().ops.linear(torch.randn(520, 300).bfloat16(), None)
    x = torch.randn(40, 300).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x)
        torch.set_num_threads(3)
        assert torch.equal(linear(x), alone)
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_many_callers_at_once() -> None:
    """The pool serves one caller; the others, which find it busy, must get the same answers."""
    linear = CpuBackend().ops.linear(torch.randn(520, 300).bfloat16(), None)
    inputs = [torch.randn(1 + i, 300).bfloat16() for i in range(8)]
    wanted = [linear(x) for x in inputs]

    def call(i: int) -> bool:
        torch.set_num_threads(4)  # more than there are cores: helpers come late, or not at all
        return all(torch.equal(linear(inputs[i]), wanted[i]) for _ in range(100))

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(inputs)) as callers:
            assert all(callers.map(call, range(len(inputs))))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_rounding_is_torchs() -> None:
    """Every storage type narrows to the nearest, ties to even, subnormals and infinities included."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1, 20_000), generator=torch.Generator().manual_seed(0))
    values = bits.int().view(torch.float32)
    specials = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, 65519.0, 65520.0, 6e-8, 2.9e-8, 1e-40, 3.3961775e38]])
    values = torch.cat([values[values.isfinite()].unsqueeze(0), specials], dim=1)
    library_ = native.load()
    assert library_ is not None
    for dtype in (torch.bfloat16, torch.float16):
        x = values.to(dtype)
        zero = torch.zeros_like(x)
        got, total = NativeOps(library_).add_rms_norm(x, zero, torch.ones(x.shape[1], dtype=dtype), 1e-5)
        assert torch.equal(total, x)  # widened, added to 0 and narrowed again
        assert got.dtype == dtype
    # a linear of one input and one-row weights narrows arbitrary float32 values
    for dtype in (torch.bfloat16, torch.float16):
        factors = torch.rand(4096, 1).to(dtype) * 2
        x = torch.full((1, 1), 1.2345, dtype=dtype)
        wide = x.float() * factors.float().T
        assert torch.equal(NativeOps(library_).linear(factors, None)(x), wide.to(dtype))


@needs_kernels
def test_unusual_models_fall_back() -> None:
    backend = CpuBackend()
    odd = spec_of(2, 1, 12, 16, torch.float32)
    assert type(backend.attention(odd, backend.device(0))) is PlainAttention
    doubles = torch.randn(3, 4, dtype=torch.float64)
    weight = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(backend.ops.linear(weight, None)(doubles), doubles @ weight.T)


@needs_kernels
def test_linear_of_any_rank() -> None:
    linear, x = CpuBackend().ops.linear(torch.randn(4, 8), None), torch.randn(2, 3, 8)
    assert torch.equal(linear(x), linear(x.view(6, 8)).view(2, 3, 4))
    assert torch.equal(linear(x[0, 0]), linear(x[0])[0])


@needs_kernels
def test_wrong_width_is_an_error_not_a_crash() -> None:
    linear = CpuBackend().ops.linear(torch.randn(4, 8), None)
    with pytest.raises(ValueError, match="8 inputs"):
        linear(torch.randn(2, 9))


def test_library_name_changes_with_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._digest(sys.executable)
    (tmp_path / "a.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._digest(sys.executable) != before


def test_memory_honours_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    monkeypatch.setattr(machine, "_control_groups", lambda: [tmp_path])
    assert machine.memory() == (500_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory().total > 1_000_000


def test_description_names_processor_and_threads() -> None:
    text = CpuBackend().describe(torch.device("cpu"))
    assert text.startswith("cpu: ")
    assert f"{torch.get_num_threads()} threads" in text
