"""Flags that were given and would do nothing: refused where somebody would be misled, named in the log elsewhere.

`flags.py` asks, knowing what was given; values that contradict one another, wherever they come from, are refused by the
configuration itself. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection

from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.errors import ConfigError, flag_names
from ssd_ascend.log import get_logger

_BRANCHES = frozenset({"fan_out", "on_miss", "branch_lowering", "draft_threads"})
"""What only matters to a worker that drafts while the target verifies."""
_WEIGHTS = frozenset({"draft_dtype", "draft_rope", "draft_temperature", "cache_bias"})
log = get_logger(__name__)


def check_use(given: Collection[str], config: SpeculationConfig) -> None:
    """given: the fields that flags set. Raises ConfigError, or logs a line, for those that `config` has no use for."""
    asked = frozenset(name for name in given if name != "speculator" and _says_something(name, config))
    if not config.enabled:
        if asked and ("draft" in asked or "speculator" not in given):
            raise ConfigError(
                f"{flag_names(asked)} given, but no speculator uses it", remedy="add --speculator sd or ssd"
            )
        _log_unused(asked, "--speculator none drafts nothing")
        return
    if config.speculator == "sd":
        _refuse(
            asked & set(config.own_worker), "sd drafts in this process, on the target's device", "use --speculator ssd"
        )
        _log_unused(asked & _BRANCHES, "sd drafts in turn with the target")
    if config.drafter == "ngram":
        _refuse(asked & {"draft"}, "n-grams have no weights", "use --drafter model or eagle3")
        _log_unused(asked & _WEIGHTS, "n-grams have no weights")
    elif config.drafter != "eagle3":
        _log_unused(asked & {"draft_rope"}, "only --drafter eagle3 has a choice")
    if config.speculators:
        _log_unused(asked & (_BRANCHES | _WEIGHTS), "speculators that others started have their own")


def _says_something(name: str, config: SpeculationConfig) -> bool:
    """Whether a flag does more than to leave to us what is ours to choose anyhow."""
    value, default = getattr(config, name), config.__dataclass_fields__[name].default
    return not (value == default == "auto")


def _refuse(fields: Collection[str], reason: str, remedy: str) -> None:
    if fields:
        raise ConfigError(f"{flag_names(fields)} given, but {reason}", remedy=f"{remedy}, or leave it out")


def _log_unused(fields: Collection[str], reason: str) -> None:
    if fields:
        log.warning("%s ignored: %s", flag_names(fields), reason)
