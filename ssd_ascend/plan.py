"""The door `python -m ssd_ascend.plan TOPOLOGY PRESET`: who runs where on a cluster, how fast, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from ssd_ascend import catalogue
from ssd_ascend.config.plan import Mode, Plan, Wish
from ssd_ascend.config.topology import Topology
from ssd_ascend.errors import ConfigError, SsdError, flag_names
from ssd_ascend.flags import fan_out
from ssd_ascend.planner import explain, make_plan
from ssd_ascend.planner.calibration import check_name, figures_of, write_calibrated
from ssd_ascend.planner.inventory import load_inventory
from ssd_ascend.planner.machine import Machine
from ssd_ascend.planner.rank_table import rank_table
from ssd_ascend.planner.svg import picture
from ssd_ascend.planner.table import update

_WISHES = tuple(Wish.__dataclass_fields__)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ssd-ascend plan",
        description="Plan a preset on a cluster: placement, predicted times, memory, and the reasons.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("topology", nargs="?", metavar="TOPOLOGY", help="a name in topology/, or a file")
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="a name in models/, or a file")
    wish = parser.add_argument_group("what is asked")
    wish.add_argument("--batch", type=int, metavar="N", help="sequences decoded together (default 1)")
    wish.add_argument("--context", type=int, metavar="N", help="tokens of each (default 4096)")
    wish.add_argument("--replicas", type=int, metavar="N", help="copies of the target (default 1)")
    wish.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    wish.add_argument("--lookahead", type=int, metavar="K", help="drafts per round (default: the best up to 8)")
    wish.add_argument(
        "--fan-out", type=fan_out, metavar="F|auto|LIST", help="guesses per accepted length (default: the preset's)"
    )
    wish.add_argument("--acceptance", type=float, metavar="A", help="chance that one more draft stands")
    wish.add_argument("--hit-rate", type=float, metavar="H", help="chance that an outcome was foreseen")
    force = parser.add_argument_group("what is left to the planner unless given")
    force.add_argument("--speculator", choices=get_args(Mode))
    force.add_argument("--tp", type=int, metavar="N", help="ranks of the target")
    force.add_argument("--speculators", type=int, metavar="N", help="speculators of each replica")
    force.add_argument("--speculator-level", metavar="LEVEL", help="over which level of links they sit")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="the whole plan as JSON")
    out.add_argument("--svg", type=Path, metavar="FILE", help="a picture of the machine with the roles in it")
    out.add_argument("--rank-table", type=Path, metavar="FILE", help="a rank table; FILE-1.json, ... for more replicas")
    out.add_argument("--rank-table-version", choices=("1.0", "1.2", "2.0"), help="default: the cluster's own")
    out.add_argument("--inventory", type=Path, metavar="FILE", help="addresses of the machines, for the rank table")
    out.add_argument(
        "--calibrate", type=Path, metavar="FILE",
        help="measure this machine; write TOPOLOGY with the results to FILE (no TOPOLOGY: FILE itself, measured anew)",
    )  # fmt: skip
    out.add_argument("--table", type=Path, metavar="FILE", help="only rewrite the table of plans in a Markdown file")
    return parser


def run(given: dict[str, object]) -> int:
    """Plan, write what was asked for, print. Returns the exit status."""
    _check_use(given)
    if isinstance(table := given.get("table"), Path):
        update(table)
        return 0
    if isinstance(out := given.get("calibrate"), Path):
        check_name(out)  # before minutes of measuring
        _calibrate(str(given["topology"]) if "topology" in given else _topology_here(out), out)
        return 0
    if "preset" not in given:
        clusters, pairs = ", ".join(catalogue.names("topology")), ", ".join(catalogue.names("models"))
        raise ConfigError("give a TOPOLOGY and a PRESET", remedy=f"topologies: {clusters}; presets: {pairs}")
    topology, name = catalogue.find_topology(str(given["topology"])), str(given["preset"])
    wish = Wish(**{key: value for key, value in given.items() if key in _WISHES})  # type: ignore[arg-type]
    plan = make_plan(topology, catalogue.find_preset(name), wish, preset_name=Path(name).name.removesuffix(".toml"))
    if isinstance(svg := given.get("svg"), Path):
        svg.write_text(picture(plan, topology), encoding="utf-8")
    if isinstance(file := given.get("rank_table"), Path):
        _write_rank_tables(file, plan, topology, given)
    print(json.dumps(plan.to_dict(), indent=2) if "json" in given else explain.text(plan, Machine.of(topology)))
    return 0


def _check_use(given: Mapping[str, object]) -> None:
    """Refuse, with ConfigError, what was given and would do nothing."""
    if "table" in given:
        unused, why, remedy = given.keys() - {"table"}, "--table only rewrites a file", "leave it out"
    elif "calibrate" in given:
        unused, why, remedy = given.keys() - {"calibrate", "topology"}, "--calibrate only measures", "leave it out"
    else:
        unused = set() if "rank_table" in given else given.keys() & {"inventory", "rank_table_version"}
        why, remedy = "no rank table is written", "add --rank-table FILE, or leave it out"
    if unused:
        places = sorted(name.upper() for name in unused & {"topology", "preset"})
        flags = flag_names(unused - {"topology", "preset"})
        raise ConfigError(f"{', '.join(filter(None, [*places, flags]))} given, but {why}", remedy=remedy)


def _topology_here(out: Path) -> str:
    """The topology to measure for when none is given: the file that is there, else the only one that this machine can
    be. ConfigError names those it may be."""
    if out.exists():
        return str(out)
    from ssd_ascend.probe.calibrate import devices  # torch, which planning does without

    found = devices()
    fitting = [
        name
        for name in catalogue.names("topology")
        if catalogue.find_topology(name).device.shares_host == found.share_host
    ]
    if len(fitting) == 1:
        return fitting[0]
    raise ConfigError(
        f"--calibrate writes a copy of a TOPOLOGY, and none was given: this machine ({found.what}) does not say which "
        "cluster it is of",
        remedy=f"give the one with these devices: {', '.join(fitting)}, or a file of your own",
    )


def _calibrate(name: str, out: Path) -> None:
    """Measure, write, and say what was found."""
    from ssd_ascend.probe.calibrate import measure  # torch, which planning does without

    topology, path = catalogue.find_topology(name), catalogue.topology_path(name)
    written = write_calibrated(path, out, measure(topology))
    assert written.calibrated is not None
    print(f"{out}: {topology.name}, measured on {written.calibrated.machine}")
    for key, figure in figures_of(written.calibrated).items():
        print(f"  {key:<24} {figure.value:g}  ({figure.note})")


def _write_rank_tables(file: Path, plan: Plan, topology: Topology, given: dict[str, object]) -> None:
    """One file a replica: every replica is a world of its own."""
    inventory = load_inventory(path) if isinstance(path := given.get("inventory"), Path) else None
    version = str(given.get("rank_table_version") or next(iter(topology.launch.rank_table_versions), "1.0"))
    for replica in plan.replicas:
        name = f"{file.stem}-{replica.index}{file.suffix}" if replica.index else file.name
        table = rank_table(topology, replica, version, inventory)
        file.with_name(name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    try:
        return run(vars(parser().parse_args(argv)))
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"error: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
