"""Every topology x every preset in one Markdown table: what is planned, or why not. `plan.py --table` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ssd_ascend import catalogue
from ssd_ascend.config.plan import Wish
from ssd_ascend.config.topology import Topology
from ssd_ascend.errors import ConfigError
from ssd_ascend.planner.search import make_plan

BEGIN = "<!-- plans: begin (written by `python -m ssd_ascend.plan --table docs/topology.md`) -->"
END = "<!-- plans: end -->"
_HEADER = (
    "| preset | plan | devices | verify ms | drafts ms | message ms | plain | sd | ssd |",
    "|---|---|---|---|---|---|---|---|---|",
)


def plans_table() -> str:
    """The tables of all shipped topologies, one sequence of 4096 tokens, greedy; tokens/s in the last columns."""
    return "\n".join(line for name in catalogue.names("topology") for line in _section(catalogue.find_topology(name)))


def _section(topology: Topology) -> Iterator[str]:
    yield from ("", f"**{topology.name}**: {topology.title}", "", *_HEADER)
    for name in catalogue.names("models"):
        yield _row(topology, name)


def _row(topology: Topology, preset_name: str) -> str:
    try:
        plan = make_plan(topology, catalogue.find_preset(preset_name), Wish(), preset_name=preset_name)
    except ConfigError as error:
        reason = error.message.removeprefix(f"{preset_name} on {topology.name}: ")
        return f"| {preset_name} | no: {reason} ({error.remedy}) | | | | | | | |"
    speculators = f" + {plan.num_speculators} over {plan.speculator_level}" if plan.num_speculators else ""
    lookahead = f", K {plan.lookahead}" if plan.lookahead else ""
    times = plan.times
    numbers = [times.verify_ms, times.wide_draft_ms or times.draft_ms, times.message_ms]
    speeds = {speed.mode: f"{speed.tokens_per_s:.0f}" for speed in plan.speeds}
    cells = [
        preset_name,
        f"{plan.mode}, TP {plan.tp}{speculators}{lookahead}",
        str(plan.devices_per_replica),
        *("" if number is None else f"{number:.2f}" for number in numbers),
        *(speeds.get(mode, "") for mode in ("none", "sd", "ssd")),
    ]
    return f"| {' | '.join(cells)} |"


def update(path: Path) -> None:
    """Put the current tables between the two marks of a Markdown file; ConfigError when it has none."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} has no place for the table", remedy=f"put {BEGIN!r} and {END!r} where it belongs")
    path.write_text(f"{before}{BEGIN}\n{plans_table()}\n\n{END}{after}", encoding="utf-8")
