"""Holds every torch_npu call of the backend to contracts: its shape functions, its schema, and those of other wheels.

    SSD_NPU_EMULATOR=1 .venv-npu/bin/python scripts/npu_contracts.py [--wheel torch_npu-2.10.0-....whl]... --out FILE

The calls are those of a golden run on the emulated NPU: every operator, captured steps, both speculators. Another
version needs no environment of its own: schemas are plain text in its libtorch_npu.so, Python names in its sources.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

NAMES = {
    "torch.npu.NPUGraph": r"class NPUGraph\b",
    "torch.npu.graph": r"^class graph\b",
    "torch.npu.graph_pool_handle": r"def graph_pool_handle\b",
    "torch.npu.graph_task_group_begin": r"def graph_task_group_begin\b",
    "torch.npu.graph_task_group_end": r"def graph_task_group_end\b",
    "torch.npu.graph_task_update_begin": r"def graph_task_update_begin\b",
    "torch.npu.graph_task_update_end": r"def graph_task_update_end\b",
    "torch.npu.ExternalEvent": r"class ExternalEvent\b",
    "torch.npu.set_compile_mode": r"def set_compile_mode\b",
    "torch.npu.get_soc_version": r"def get_soc_version\b",
    "torch.npu.mem_get_info": r"def mem_get_info\b",
    "torch.npu.config.allow_internal_format": r"allow_internal_format",
}
"""Python names that the backend uses -> where a wheel's sources define them."""
BINDINGS = {"torch_npu._C._weak_ref_tensor": b"_weak_ref_tensor", "ProcessGroupHCCL": b"ProcessGroupHCCL"}
VARIABLES = ("TORCH_NPU_FALLBACK_CPU_DISABLE", "TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "P2P_HCCL_BUFFSIZE")
OPTIONAL = {
    "aten::mm.dtype": "without it the vocabulary head rounds its logits (ops.py)",
    "TORCH_NPU_FALLBACK_CPU_DISABLE": "without it an operator that falls back to the CPU only warns",
}


@dataclass
class Calls:
    """Distinct calls of one operator: their arguments as meta tensors, and what came out."""

    operator: Any
    made: int = 0
    distinct: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict)


class Watch(TorchDispatchMode):
    """Notes every call of an operator of torch_npu's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Calls] = {}
        self.aten: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "npu":
            self.aten.add(str(func))
            return result
        noted = self.calls.setdefault(str(func), Calls(func))
        noted.made += 1
        outline = (_as_meta(args), _as_meta(kwargs), _as_meta(result))
        noted.distinct.setdefault(_outline(outline), outline)
        return result


@contextmanager
def watching() -> Iterator[Watch]:
    """The calls made inside."""
    watch = Watch()
    with watch:
        yield watch


def _as_meta(value: Any) -> Any:
    def convert(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")

    return tree_map_only(torch.Tensor, convert, value)


def _outline(value: Any) -> str:
    leaves, spec = tree_flatten(value)
    return repr([(x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x) for x in leaves]) + str(spec)


def meta_verdict(calls: Calls) -> str:
    """Whether torch_npu's own shape functions give what the calls gave: "ok", or why not."""
    for args, kwargs, expected in calls.distinct.values():
        try:
            found = calls.operator(*args, **kwargs)
        except NotImplementedError:
            return "no shape function"
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            return f"refused: {str(error).splitlines()[0]}"
        pairs = zip(*(tree_flatten(x)[0] for x in (found, expected)), strict=True)
        for a, b in pairs:
            if isinstance(a, torch.Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"{tuple(a.shape)} {a.dtype} foreseen, {tuple(b.shape)} {b.dtype} found"
    return "ok"


def arguments_of(calls: Calls) -> set[str]:
    """The names of the arguments that some call gave."""
    schema, used = calls.operator._schema.arguments, set()
    for args, kwargs, _ in calls.distinct.values():
        used |= {argument.name for argument, _ in zip(schema, args, strict=False)} | set(kwargs)
    return used


def schema_verdict(calls: Calls, theirs: str | None) -> str:
    """Whether another version takes the same calls: "same", "compatible: ...", or what is missing."""
    if theirs is None:
        return "missing"
    own, other = calls.operator._schema, torch._C.parse_schema(f"npu::{theirs}")
    if str(own) == str(other):
        return "same"
    ours, others = ({a.name: str(a.type) for a in schema.arguments} for schema in (own, other))
    used = sorted(arguments_of(calls))
    wrong = [f"no {name}" for name in used if name not in others]
    wrong += [f"{n} was {others[n]}, is {ours[n]}" for n in used if n in others and ours[n] != others[n]]
    if wrong:
        return f"incompatible: {', '.join(wrong)}"
    changed = sorted(n for n in ours | others if ours.get(n) != others.get(n))
    return f"compatible: differs in what we leave out ({', '.join(changed) or 'defaults'})"


class Wheel:
    """What can be read of a wheel without installing it."""

    def __init__(self, path: Path) -> None:
        self.version = path.name.split("-")[1]
        with zipfile.ZipFile(path) as archive:
            self.library = archive.read("torch_npu/lib/libtorch_npu.so")
            bindings = [
                name for name in archive.namelist() if re.match(r"torch_npu/_C\..*\.so$|.*libtorch_npu_python.*", name)
            ]
            self.binary = self.library + b"".join(map(archive.read, bindings))
            names = [name for name in archive.namelist() if name.startswith("torch_npu/npu/") and name.endswith(".py")]
            self.sources = "\n".join(archive.read(name).decode(errors="replace") for name in names)

    def schema(self, operator: Any) -> str | None:
        """The text with which it registers an operator."""
        name = operator._schema.name.partition("::")[2]
        overload = f".{operator._schema.overload_name}" if operator._schema.overload_name else ""
        pattern = re.escape(f"{name}{overload}(").encode() + rb"[^\0\n]*?\) -> [^\0\n]+"
        found = re.search(rb"(?<=\0)" + pattern, self.library)
        return found[0].decode() if found else None

    def names(self) -> dict[str, bool]:
        """Which of the names that we use it has."""
        found = {name: bool(re.search(pattern, self.sources, re.M)) for name, pattern in NAMES.items()}
        found |= {name: word in self.binary for name, word in BINDINGS.items()}
        return found | {name: name.encode() in self.library for name in VARIABLES}


def report(watch: Watch, wheels: list[Wheel]) -> dict[str, Any]:
    """All verdicts."""
    import torch_npu

    operators: dict[str, Any] = {}
    for name, calls in sorted(watch.calls.items()):
        operators[name] = {
            "calls": calls.made,
            "distinct": len(calls.distinct),
            "arguments": sorted(arguments_of(calls)),
            "shape function": meta_verdict(calls),
            **{wheel.version: schema_verdict(calls, wheel.schema(calls.operator)) for wheel in wheels},
        }
    return {
        "torch_npu": torch_npu.__version__,
        "operators": operators,
        "aten operators": sorted(watch.aten),
        "names": {wheel.version: wheel.names() for wheel in wheels},
        "optional": OPTIONAL,
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What would break."""
    bad = [
        f"{name}: {key}: {verdict}"
        for name, operator in found["operators"].items()
        for key, verdict in operator.items()
        if isinstance(verdict, str) and verdict.startswith(("incompatible", "missing", "refused", "("))
    ]
    lacking = [
        (version, name) for version, names in found["names"].items() for name, there in names.items() if not there
    ]
    return bad + [f"{version}: no {name}" for version, name in lacking if name not in found["optional"]]


def main() -> int:
    """Run, write, and say what would break."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--wheel", type=Path, action="append", default=[], help="another version to check against")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from ssd_ascend.parity.recording import Options, record

    with watching() as watch:
        record(Options(device="npu"), lambda _: None)
    found = report(watch, [Wheel(path) for path in args.wheel])
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    bad = problems(found)
    print(f"{len(found['operators'])} operators of torch_npu, {len(bad)} problems", *bad, sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
