"""The rules of the house as pure functions: source text in, a list of complaints out. `test_rules.py` shows each bites.

The tables below are the one home of the layer order and of every exception; an exception carries its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PACKAGE = "ssd_ascend"

# From the top down. A module may import modules of its own or a lower floor, and no ring may form.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("cli", "__main__", "__init__", "generate", "chat", "doctor", "plan", "train", "speculate"),
    ("flags", "flag_rules", "progress"),
    ("probe",),
    ("llm", "serve", "parity"),
    ("engine",),
    ("speculation", "training"),
    ("runtime",),
    ("weights",),
    ("architectures",),
    ("layers", "kv"),
    ("backends", "distributed", "transport", "planner", "catalogue", "structured"),
    ("core", "config", "text"),
    ("errors", "env", "log", "trace", "registry"),
)
DOORS = ("cli", "__main__", "doctor", "generate", "chat", "plan", "train", "speculate")  # and any */__main__.py

TORCH_FREE = (
    *("errors", "env", "log", "trace", "registry", "cli", "flags", "flag_rules", "catalogue"),
    *(
        "config",
        "core",
        "planner",
        "kv.blocks",
        "engine.scheduler",
        "engine.outputs",
        "engine.answers",
        "serve.protocol",
    ),
    *("structured",),
)

DEVICE_WORDS = ("cuda", "npu", "triton", "hccl", "nccl")  # torch_npu is caught by its second half
DEVICE_WORDS_ALLOWED: Mapping[str, str] = {
    "env": "names the variable SSD_NPU_EMULATOR",
    "doctor": "looks for hardware no backend has claimed yet, and says which extra serves it",
    "flags": "the help of --device says which kinds of device there are",
}
DEVICE_WORDS_HOME = ("backends.registry", "backends.cuda", "backends.npu")
# Who may look a backend up by name; everyone else is handed one.
BACKEND_LOOKUP = (
    *("engine.builder", "doctor", "speculation.worker_link", "train", "serve.__main__"),
    *("parity.recording", "probe.report", "probe.links", "probe.calibrate"),
)

MAX_LINES = 400
LONG_FILES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its name below the package (`core.sequence`, `core.__init__`) and its text."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_door(self) -> bool:
        return self.name in DOORS or self.name.endswith(".__main__")


def floor_of(name: str) -> int | None:
    """Height of a module's room, 0 being the ground; the command line of a room (`serve.__main__`) is a door."""
    room = "cli" if name.endswith(".__main__") else name.partition(".")[0]
    for height, rooms in enumerate(reversed(FLOORS)):
        if room in rooms:
            return height
    return None


def imports(module: Module, known: Iterable[str] = ()) -> Iterator[tuple[int, str]]:
    """(line, imported module below the package) of every import, typing and function-local ones included."""
    known = set(known)
    parts = module.name.split(".")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` in core.sequence and in core.__init__ both mean core: drop the last part either way
            base = ".".join([PACKAGE, *parts[: len(parts) - node.level]]) if node.level else ""
            base = ".".join(part for part in (base, node.module or "") if part)
            found = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name.partition(".")[0] == PACKAGE and "." in name:
                yield node.lineno, _module_of(name.removeprefix(f"{PACKAGE}."), known)


def _module_of(name: str, known: set[str]) -> str:
    """The module an imported dotted name lies in: itself, its package, or the module it is an attribute of."""
    candidate = name
    while candidate:
        if candidate in known:
            return candidate
        if f"{candidate}.__init__" in known:
            return f"{candidate}.__init__"
        candidate = candidate.rpartition(".")[0]
    return name


def layer_order(modules: Iterable[Module]) -> list[str]:
    """Imports point down; every room has a floor."""
    modules = list(modules)
    known = {module.name for module in modules}
    problems = []
    for module in modules:
        height = floor_of(module.name)
        if height is None:
            problems.append(f"{module.name}: room {module.room!r} has no floor in FLOORS")
            continue
        for line, target in imports(module, known):
            below = floor_of(target)
            if below is None or below > height:
                problems.append(f"{module.name}:{line}: imports {target}, which lies above it")
    return problems


def rings(modules: Iterable[Module]) -> list[str]:
    """No module reaches itself through imports, and no two rooms import each other."""
    modules = list(modules)
    known = {module.name for module in modules}
    files = {module.name: {target for _, target in imports(module, known)} for module in modules}
    rooms: dict[str, set[str]] = {}
    for module in modules:
        if not module.is_door:
            targets = {target.partition(".")[0] for target in files[module.name]} - {module.room}
            rooms.setdefault(module.room, set()).update(targets)
    return [" -> ".join(ring) for graph in (files, rooms) if (ring := _ring(graph))]


def _ring(graph: Mapping[str, set[str]]) -> list[str] | None:
    """One cycle of a directed graph, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph.get(node, ())):
            if found := visit(target, [*path, node]):
                return found
        done.add(node)
        return None

    for start in sorted(graph):
        if found := visit(start, []):
            return found
    return None


def backend_walls(module: Module) -> list[str]:
    """Backends do not know each other (but for cpu.ops); above them only the protocol is named."""
    own = module.name.split(".")[1] if module.name.startswith("backends.") else None
    problems = []
    for line, target in imports(module):
        room, _, rest = target.partition(".")
        other = rest.partition(".")[0]
        if room != "backends" or other in ("", "base", "__init__") or other == own:
            continue
        if other == "registry" and (module.name in BACKEND_LOOKUP or own):
            continue
        if own in ("cuda", "npu") and rest.startswith("cpu.ops"):
            continue
        problems.append(f"{module.name}:{line}: imports {target}; only backends.base may be named here")
    return problems


def environment(module: Module) -> list[str]:
    """Only env.py touches the process environment."""
    if module.name == "env":
        return []
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    problems = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            problems.append(f"{module.name}:{node.lineno}: os.{node.attr}; ask ssd_ascend.env")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            problems += [f"{module.name}:{node.lineno}: os.{a.name}" for a in node.names if a.name in names]
    return problems


def device_words(module: Module) -> list[str]:
    """Code and strings name no device outside its backend; comments and docstrings may explain."""
    if module.name in DEVICE_WORDS_ALLOWED or ".".join(module.name.split(".")[:2]) in DEVICE_WORDS_HOME:
        return []
    tree = module.tree  # parsed once: nodes are told apart by identity
    prose = {id(node.body[0].value) for node in _documented(tree)}
    return [
        f"{module.name}:{getattr(node, 'lineno', 0)}: the word {word!r} in {text!r}"
        for node in ast.walk(tree)
        if id(node) not in prose
        for text in _words(node)
        for word in re.findall(r"[a-z0-9]+", text.lower())
        if word in DEVICE_WORDS
    ]


def _words(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "name", "arg", "asname", "module"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, holders) and ast.get_docstring(node) is not None:
            yield node


def opening(module: Module) -> list[str]:
    """Every module opens by saying what the room is for."""
    return [] if ast.get_docstring(module.tree) else [f"{module.name}: no docstring at the top"]


def thin_init(module: Module) -> list[str]:
    """An `__init__.py` hands names on; the package's own may do it lazily, so that importing it needs no torch."""
    if module.name.rpartition(".")[2] != "__init__":
        return []
    problems = []
    for node in module.tree.body:
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        lazy = (
            module.name == "__init__" and isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        )
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        prose = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        dunder = bool(names) and all(name.startswith("__") for name in names)
        if not (isinstance(node, ast.Import | ast.ImportFrom) or lazy or typing_only or prose or dunder):
            problems.append(f"{module.name}:{node.lineno}: logic in an __init__.py")
    return problems


def quiet(module: Module) -> list[str]:
    """Only doors print; everyone else logs, because standard output is for answers."""
    if module.is_door:
        return []
    return [
        f"{module.name}:{node.lineno}: print(); use ssd_ascend.log"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


_CONTAINERS = ("dict", "list", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray")
_MUTATORS = (
    *("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "popleft"),
    *("appendleft", "remove", "discard", "clear", "sort", "reverse"),
)


def no_globals(module: Module) -> list[str]:
    """No state in modules: no `global`, no lower-case container, no container changed by the module itself."""
    tree, problems = module.tree, []
    containers: dict[str, int] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and _is_container(getattr(node, "value", None)):
                containers[target.id] = node.lineno
    for name, line in containers.items():
        if not name.strip("_").isupper() and not name.startswith("__"):
            problems.append(f"{module.name}:{line}: module-level container {name!r}; a constant is upper case")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            problems.append(f"{module.name}:{node.lineno}: global {', '.join(node.names)}")
        elif (name := _changed(node)) in containers:
            problems.append(f"{module.name}:{getattr(node, 'lineno', 0)}: changes the module-level container {name!r}")
    return problems


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in _CONTAINERS
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def _changed(node: ast.AST) -> str | None:
    """The plain name a node changes in place: name[...] = x, name[...] += x, del name[...], name.append(x)."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    ):
        return node.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None


def short(module: Module) -> list[str]:
    """A file that no longer fits a reader's head is split, or its reason is written down."""
    lines = module.text.count("\n") + 1
    if lines <= MAX_LINES or module.name in LONG_FILES:
        return []
    return [f"{module.name}: {lines} lines, more than {MAX_LINES}; split it, or give LONG_FILES a reason"]


def full_flags(module: Module) -> list[str]:
    """No command takes a shortened flag: one that is added later would give the old line another meaning."""
    parsers = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _called(node) in ("ArgumentParser", "add_parser")
    ]
    return [
        f"{module.name}:{node.lineno}: a parser that takes shortened flags; say allow_abbrev=False"
        for node in parsers
        if not any(
            word.arg == "allow_abbrev" and isinstance(word.value, ast.Constant) and word.value.value is False
            for word in node.keywords
        )
    ]


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


PER_MODULE = (backend_walls, environment, device_words, opening, thin_init, quiet, no_globals, short)
