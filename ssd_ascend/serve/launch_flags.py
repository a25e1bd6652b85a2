"""The flags that make the server's door the launcher of a whole plan, as one table: what the parser adds, what no
process of the plan gets, and what is refused without a topology follow from it. `arguments.py` and `launch.py` read it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from ssd_ascend.errors import ConfigError, flag_names

LAUNCH_FLAGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "--topology": {"metavar": "FILE", "help": "a name in topology/, or a file: start the whole plan for it"},
    "--preset": {"metavar": "NAME", "help": "the preset to serve there (with --topology)"},
    "--replicas": {"type": int, "metavar": "N", "help": "copies of the target, behind one router (default 1)"},
    "--batch": {"type": int, "metavar": "N", "help": "sequences at once that the plan is made for (default 1)"},
    "--context": {"type": int, "metavar": "N", "help": "tokens of each that the plan is made for (default 4096)"},
    "--speculators-per-replica": {"type": int, "metavar": "N", "help": "default: as planned"},
    "--ray": {"metavar": "ADDRESS", "help": "as actors of this Ray cluster ('auto': the one around us)"},
    "--ray-serve": {"action": "store_true", "help": "the router as a Ray Serve application (with --ray)"},
}
"""Each with what argparse is told of it."""
_PLANNED: Final = frozenset({"model", "lookahead", "speculators", "draft_device"})
"""Settings of an engine that follow from the preset and the plan."""


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them. Those that were not given stay absent."""
    group = parser.add_argument_group("several processes, as planned for a cluster")
    for name, options in LAUNCH_FLAGS.items():
        group.add_argument(name, default=argparse.SUPPRESS, **options)


def check_launch_flags(args: argparse.Namespace) -> None:
    """Refuse, with ConfigError, launch flags without a topology, and beside one what its plan decides."""
    given = vars(args).keys()
    if "topology" not in given:
        if alone := given & {name.removeprefix("--").replace("-", "_") for name in LAUNCH_FLAGS}:
            raise ConfigError(
                f"{flag_names(alone)} given, but no topology to plan for",
                remedy="add --topology, or leave it out (one engine is named by --model)",
            )
    elif decided := given & _PLANNED:
        raise ConfigError(
            f"{flag_names(decided)} given, but --preset and the plan for --topology decide that",
            remedy="leave it out, or write a preset of your own",
        )
