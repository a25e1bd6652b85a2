"""The only reader of os.environ: one typed accessor per variable, read when asked.

The command lines use these as defaults (a flag beats the environment, the environment beats a preset); `doctor` and
the documentation print `VARIABLES`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssd_ascend.errors import ConfigError

# The one thing done at import, as torch reads it when *it* is imported: device plug-ins are loaded by the backend that
# wants them. Otherwise a torch_npu without its driver would break `import torch` for everybody, with a page of words.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: what it means, what holds when it is unset, and whether its value is a secret."""

    name: str
    meaning: str
    default: str
    secret: bool = False


VARIABLES: tuple[Variable, ...] = (
    Variable("SSD_DEVICE", "device type to serve on: cpu, cuda or npu", "the best device found"),
    Variable("SSD_TARGET_MODEL", "target model when --model is not given", "none"),
    Variable("SSD_DRAFT_MODEL", "draft model or EAGLE-3 head when --draft is not given", "none"),
    Variable("SSD_HF_CACHE", "folder holding Hugging Face hub downloads", "the hub's own default"),
    Variable("SSD_DATASET_DIR", "folder holding the benchmark datasets", "none"),
    Variable("SSD_LOG_LEVEL", f"one of {', '.join(LOG_LEVELS)}", "INFO"),
    Variable("SSD_LOG_FORMAT", "text, or json for one object a line", "text"),
    Variable("SSD_API_KEY", "key clients must send when --api-key is not given", "none", secret=True),
    Variable("SSD_ADMIN_KEY", "key of the admin endpoint when --admin-key is not given", "none", secret=True),
    Variable("SSD_SPECULATOR_SECRET", "what targets and remote speculators must both know", "none", secret=True),
    Variable("SSD_CPU_KERNELS", "0 to run the CPU backend in plain torch instead of compiled kernels", "1"),
    Variable("SSD_NPU_EMULATOR", "1 to run the NPU backend on its CPU emulator", "0"),
)


def _text(name: str) -> str | None:
    """The stripped value of a variable, or None when it is unset or empty."""
    value = os.environ.get(name, "").strip()
    return value or None


def _path(name: str) -> Path | None:
    value = _text(name)
    return Path(value).expanduser() if value else None


def _flag(name: str) -> bool:
    value = (_text(name) or "0").lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"{name}={value!r} is not a switch", remedy="use 1 or 0")


def _key(name: str) -> str | None:
    """As `_text`, but empty is not unset: who sets a key means to keep somebody out."""
    value = _text(name)
    if value is None and name in os.environ:
        raise ConfigError(f"{name} is empty: it would keep nobody out", remedy="give it some text, or unset it")
    return value


def device() -> str | None:
    """SSD_DEVICE: the device type to serve on."""
    value = _text("SSD_DEVICE")
    return value.lower() if value else None


def target_model() -> str | None:
    """SSD_TARGET_MODEL: what --model means when it is not given."""
    return _text("SSD_TARGET_MODEL")


def draft_model() -> str | None:
    """SSD_DRAFT_MODEL: what --draft means when it is not given."""
    return _text("SSD_DRAFT_MODEL")


def hf_cache() -> Path | None:
    """SSD_HF_CACHE: folder holding Hugging Face hub downloads."""
    return _path("SSD_HF_CACHE")


def dataset_dir() -> Path | None:
    """SSD_DATASET_DIR: folder holding the benchmark datasets."""
    return _path("SSD_DATASET_DIR")


def log_level() -> str:
    """SSD_LOG_LEVEL, upper case; raises ConfigError on a level that does not exist."""
    value = (_text("SSD_LOG_LEVEL") or "INFO").upper()
    if value not in LOG_LEVELS:
        raise ConfigError(f"SSD_LOG_LEVEL={value!r} is not a log level", remedy=f"use one of {', '.join(LOG_LEVELS)}")
    return value


def api_key() -> str | None:
    """SSD_API_KEY: the key clients must send; raises ConfigError where it is set to nothing."""
    return _key("SSD_API_KEY")


def admin_key() -> str | None:
    """SSD_ADMIN_KEY: the key of the admin endpoint; raises ConfigError where it is set to nothing."""
    return _key("SSD_ADMIN_KEY")


def log_format() -> str:
    """SSD_LOG_FORMAT; raises ConfigError on a format that does not exist. Processes that we start inherit it."""
    value = (_text("SSD_LOG_FORMAT") or "text").lower()
    if value not in LOG_FORMATS:
        raise ConfigError(
            f"SSD_LOG_FORMAT={value!r} is not a log format", remedy=f"use one of {', '.join(LOG_FORMATS)}"
        )
    return value


def speculator_secret() -> str | None:
    """SSD_SPECULATOR_SECRET: what targets and remote speculators must both know."""
    return _text("SSD_SPECULATOR_SECRET")


def npu_emulator() -> bool:
    """SSD_NPU_EMULATOR: whether the NPU backend runs on its CPU emulator."""
    return _flag("SSD_NPU_EMULATOR")


def cpu_kernels() -> bool:
    """SSD_CPU_KERNELS: whether the CPU backend compiles and uses its own kernels."""
    return _text("SSD_CPU_KERNELS") is None or _flag("SSD_CPU_KERNELS")


def provide(defaults: Mapping[str, str]) -> None:
    """Give libraries that read the environment themselves their settings; what the user has set stays."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def hand_down(values: Mapping[str, str]) -> None:
    """What a flag of ours says, for processes that we start: as a flag does, it beats what was set."""
    os.environ.update(values)


def child(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: ours, with these changes."""
    return {**os.environ, **changes}


def foreign(name: str) -> str | None:
    """The value of another program's variable."""
    return _text(name)


def cache_home() -> Path:
    """XDG_CACHE_HOME: where caches of compiled code live, ~/.cache when unset."""
    return _path("XDG_CACHE_HOME") or Path.home() / ".cache"


def let_threads_sleep() -> None:
    """Make OpenMP threads sleep while they wait, here and in processes started later, unless the user chose otherwise.

    Takes effect only before torch is imported, so every door calls it first. A target and a draft worker share cores,
    and threads that spin for a core the other needs slow both down many times over.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def is_set(name: str) -> bool:
    """Whether a variable of `VARIABLES` has a value, without revealing it (secrets stay out of reports)."""
    return _text(name) is not None


def report() -> dict[str, str]:
    """Every variable that is set, with secrets masked; for `doctor` and start-up logs."""
    found = {variable: _text(variable.name) for variable in VARIABLES}
    return {v.name: "(set)" if v.secret else value for v, value in found.items() if value is not None}
