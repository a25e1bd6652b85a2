"""What needs no extra runs without one: `LLM`, training, a draft worker and the benchmarks, on the core's packages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORT_NAMES = {"prometheus-client": "prometheus_client"}
MODULES = (
    "ssd_ascend.llm",
    "ssd_ascend.generate",
    "ssd_ascend.chat",
    "ssd_ascend.train",
    "ssd_ascend.plan",
    "ssd_ascend.speculate",
    "ssd_ascend.doctor",
    "ssd_ascend.speculation.worker_link",
    "ssd_ascend.transport.wire",
    "bench.bench",
    "bench.two_gpus",
    "bench.links",
)

ALONE = """
import importlib, sys
absent, modules = (text.split(",") for text in sys.argv[1:])

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""


def test_nothing_of_the_core_imports_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [line for extra in ("serve", "gguf", "structured", "otel", "ray", "bench") for line in extras[extra]]
    packages = {re.split(r"[\[><=;]", line)[0] for line in named} - {"ssd-ascend"}
    absent = {IMPORT_NAMES.get(name, name.split("-")[0]) for name in packages}
    assert {"msgspec", "fastapi", "gguf"} <= absent
    command = [sys.executable, "-c", ALONE, ",".join(sorted(absent)), ",".join(MODULES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
