"""Compiles `src/*.cpp` once per machine into a cache folder; called by `library.load`.

The file name is a digest of everything that shapes the machine code (sources, compiler, flags, processor), so a cache
shared between machines holds one library for each. No torch headers: the whole build takes a few seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd_ascend.log import fields, get_logger

log = get_logger(__name__)

SOURCES = Path(__file__).with_name("src")
COMPILERS = ("g++", "c++")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi",
    "-ffp-contract=off",  # products and sums are fused where the source says so: see fma in common.h
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_TIMEOUT_S = 300


class BuildError(Exception):
    """Why there is no library; its text fits one log line."""


def build(folder: Path, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """The compiled library in `folder`, built now if it is not there. Raises BuildError."""
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (tried {', '.join(compilers)})")
    library = folder / f"kernels-{_digest(compiler)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():  # another process may have built it while we waited
                _compile(compiler, library)
    except OSError as error:
        raise BuildError(f"cannot build in {folder}: {error}") from error
    return library


def _compile(compiler: str, library: Path) -> None:
    """Compile all sources side by side, link, and move the result into place in one step."""
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch, tempfile.TemporaryFile() as messages:
        running = [
            subprocess.Popen(
                [compiler, *FLAGS, "-c", str(source), "-o", f"{scratch}/{source.stem}.o"],
                stderr=messages, stdout=subprocess.DEVNULL,
            )
            for source in sources
        ]  # fmt: skip
        try:
            codes = [process.wait(timeout=_TIMEOUT_S) for process in running]
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} did not finish within {_TIMEOUT_S} s") from error
        finally:
            for process in running:
                process.kill()
                process.wait()
        if not any(codes):
            objects = [f"{scratch}/{source.stem}.o" for source in sources]
            link = [compiler, "-shared", *objects, "-pthread", "-o", f"{scratch}/library.so"]
            codes = [subprocess.run(link, stderr=messages, stdout=subprocess.DEVNULL, timeout=_TIMEOUT_S).returncode]
        if any(codes):
            messages.seek(0)
            raise BuildError(f"{compiler} failed: {_first_error(messages.read().decode(errors='replace'))}")
        Path(scratch, "library.so").replace(library)
    log.info("compiled the CPU kernels %s", fields(library=library))


def _first_error(messages: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    digest = hashlib.sha256()
    for part in (version, " ".join(FLAGS).encode(), _processor()):
        digest.update(part + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> bytes:
    """What -march=native looks at: the model and the instruction sets of this processor."""
    parts = [platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        kept = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
        first, _, _ = cpuinfo.read_text().partition("\n\n")
        parts += [line for line in first.splitlines() if line.partition(":")[0].strip() in kept]
    return "\n".join(parts).encode()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when a process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
