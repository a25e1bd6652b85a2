"""Compiles the emulator once per machine and torch version into a cache folder; called by `loader.load`.

One compiler run after the other: libascendcl and libhccl (plain C++), then libopapi (over libtorch, all sources in one
go, so that torch's headers are parsed once). The other libraries torch_npu wants are empty and only lead to these.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ssd_ascend.errors import ConfigError
from ssd_ascend.log import fields, get_logger

log = get_logger(__name__)

SOURCES = Path(__file__).with_name("src")
COMPILERS = ("g++", "c++")
COMPANIONS = ("hcomm", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "nnopbase")
"""What torch_npu is linked to or opens besides; libopapi is opened by libascendcl's aclInit."""
HOME = ("runtime", "compiler", "opp")
"""Folders of a CANN installation that torch_npu looks for; empty here."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-DFUNC_VISIBILITY", "-Wl,-rpath,$ORIGIN")
_TIMEOUT_S = 600


def build(cache: Path, torch_folder: Path, torch_npu_folder: Path, versions: str) -> Path:
    """The folder with all libraries, built now if it is not there. ConfigError when it cannot be."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise ConfigError(
            f"the NPU emulator needs a C++ compiler and none was found (tried {', '.join(COMPILERS)})",
            remedy="install g++ (Debian: apt install g++)",
        )
    folder = cache / _digest(compiler, versions)
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.exists():  # another process may have built it while we waited
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = Path(scratch) / "lib"
                made.mkdir()
                began = time.monotonic()
                _compile_all(compiler, made, torch_folder, torch_npu_folder)
                made.replace(folder)  # in one step: nobody ever sees half of it
            log.info("compiled the NPU emulator %s", fields(seconds=round(time.monotonic() - began), folder=folder))
    return folder


def _compile_all(compiler: str, out: Path, torch_folder: Path, torch_npu_folder: Path) -> None:
    headers = f"-I{torch_npu_folder}/include/third_party/acl/inc"
    runtime = sorted(str(source) for source in (SOURCES / "runtime").glob("*.cpp"))
    _run([compiler, *FLAGS, headers, *runtime, *_named(out, "ascendcl"), "-ldl", "-pthread"])
    leads = ("-Wl,--no-as-needed", f"-L{out}", "-lascendcl")
    hccl_headers = f"-I{torch_npu_folder}/include"
    sources = sorted(str(source) for source in (SOURCES / "hccl").glob("*.cpp"))
    _run([compiler, *FLAGS, headers, hccl_headers, *sources, *_named(out, "hccl"), *leads, "-lrt"])
    for name in HOME:
        (out / name).mkdir()
    for name in COMPANIONS:
        _run([compiler, *FLAGS, "-x", "c++", "/dev/null", "-x", "none", *_named(out, name), *leads, "-lhccl"])
    everything = "".join(f'#include "{source}"\n' for source in sorted((SOURCES / "opapi").glob("*.cpp")))
    torch_headers = [f"-isystem{torch_folder}/include{rest}" for rest in ("", "/torch/csrc/api/include")]
    libraries = (f"-L{out}", "-lascendcl", f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10")
    unit = out / "all.cpp"
    unit.write_text(everything, encoding="utf-8")
    _run([compiler, *FLAGS, headers, *torch_headers, str(unit), *_named(out, "opapi"), *libraries])
    unit.unlink()


def _named(out: Path, name: str) -> tuple[str, str, str]:
    return "-o", f"{out}/lib{name}.so", f"-Wl,-soname,lib{name}.so"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise ConfigError(
            f"the NPU emulator does not compile: {lines[0] if lines else 'no message'}",
            remedy="use the versions of torch and torch_npu in requirements/npu.txt",
        )


def _digest(compiler: str, versions: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    digest = hashlib.sha256(b"\0".join((version, versions.encode(), " ".join(FLAGS + COMPANIONS + HOME).encode())))
    for source in sorted(SOURCES.rglob("*.*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when a process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
