"""A picture of the machine with the roles in it, and of one round in time: SVG text, no library. For `plan.py --svg`.

Nodes are boxes, packages are frames, devices are squares: T0.. are the target's ranks, S0.. its speculators. Each
replica has a colour of its own. Large clusters show the nodes that hold roles, up to `MAX_NODES`, and count the rest.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from html import escape

from ssd_ascend.config.plan import Plan
from ssd_ascend.config.topology import Topology
from ssd_ascend.planner.explain import layout
from ssd_ascend.planner.machine import Machine

MAX_NODES = 24
_WIDTH = 1120
_MARGIN = 32
_CELL = 44
_GAP = 6
_INK, _PALE, _FRAME = "#1f2933", "#e4e7eb", "#9aa5b1"
_VERIFY, _DRAFT, _MESSAGE = "#2563a8", "#d9822b", "#6b7280"


def picture(plan: Plan, topology: Topology) -> str:
    """The SVG document."""
    machine = Machine.of(topology)
    body = [
        _text(_MARGIN, 44, topology.title, size=22, weight="600"),
        _text(_MARGIN, 70, f"{plan.preset}: {layout(plan)}", size=15),
        _text(_MARGIN, 92, _headline(plan), size=15, colour="#52606d"),
    ]
    legend, top = _legend(plan, 118)
    grid, bottom = _grid(plan, machine, top + 14)
    rounds, height = _rounds(plan, bottom + 34)
    content = "\n".join([*body, *legend, *grid, *rounds])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
        f"<title>{escape(f'{plan.preset} on {plan.topology}')}</title>\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n{content}\n</svg>\n'
    )


def _headline(plan: Plan) -> str:
    replicas = f"{len(plan.replicas)} replica{'s' if len(plan.replicas) > 1 else ''}"
    wish = plan.wish
    return (
        f"{plan.speed.tokens_per_s:.0f} tokens/s a replica, {replicas}; batch {wish.batch}, context {wish.context}, "
        f"temperature {wish.temperature:g}" + ("" if plan.calibrated else "; not calibrated")
    )


def _text(
    x: float, y: float, words: str, *, size: int = 13, colour: str = _INK, weight: str = "400", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _box(x: float, y: float, w: float, h: float, fill: str, *, line: str = "none", dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}" stroke="{line}" '
        f'stroke-width="1.5"{dashes}/>'
    )


def _colour(replica: int, *, light: float) -> str:
    """A colour per replica; neighbours differ by the golden angle."""
    red, green, blue = colorsys.hls_to_rgb((0.58 + replica * 0.381966) % 1.0, light, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _device(x: float, y: float, role: tuple[str, int] | None, index: int | None) -> str:
    """One square: a target rank is filled, a speculator outlined, a spare dashed, a free device pale."""
    label = role[0] if role else ""
    if role is None:
        shape = _box(x, y, _CELL, _CELL, _PALE)
    elif label.startswith("T"):
        shape = _box(x, y, _CELL, _CELL, _colour(role[1], light=0.42))
    elif label.startswith("S"):
        shape = _box(x, y, _CELL, _CELL, _colour(role[1], light=0.88), line=_colour(role[1], light=0.42))
    else:
        shape = _box(x, y, _CELL, _CELL, "#ffffff", line=_FRAME, dash="4 3")
    ink = "#ffffff" if label.startswith("T") else _INK
    name = _text(x + _CELL / 2, y + 21, label, size=14, weight="600", colour=ink, anchor="middle") if label else ""
    number = _text(x + _CELL / 2, y + 37, f"{index}", size=10, colour=ink, anchor="middle") if index is not None else ""
    return shape + name + number


def _legend(plan: Plan, y: float) -> tuple[list[str], float]:
    entries = [("T0", "target rank")]
    entries += [("S0", "speculator")] if plan.num_speculators else []
    entries += [("–", "spare: completes a package")] if any(replica.spare for replica in plan.replicas) else []
    parts, x = [], float(_MARGIN)
    for label, words in [*entries, ("", "free")]:
        square = _device(0, 0, (label, 0) if label else None, None)
        parts.append(f'<g transform="translate({x:g} {y:g}) scale(0.5)">{square}</g>')
        parts.append(_text(x + 30, y + 16, words))
        x += 60 + 8 * len(words)
    parts.append(_text(x, y + 16, "small numbers: devices in physical order", colour="#52606d"))
    return parts, y + 26


def _roles(plan: Plan) -> dict[int, tuple[str, int]]:
    roles: dict[int, tuple[str, int]] = {}
    for replica in plan.replicas:
        roles |= {device: (f"T{rank}", replica.index) for rank, device in enumerate(replica.target)}
        roles |= {device: (f"S{number}", replica.index) for number, device in enumerate(replica.speculators)}
        roles |= dict.fromkeys(replica.spare, ("–", replica.index))
    return roles


def _grid(plan: Plan, machine: Machine, top: float) -> tuple[list[str], float]:
    """The nodes that hold roles (and free neighbours while there is room), in rows; returns the bottom edge."""
    roles, size = _roles(plan), machine.node_size
    used = sorted({device // size for device in roles})
    total = machine.devices // size
    shown = used[:MAX_NODES] if len(used) > 1 or total > MAX_NODES else list(range(total))
    per_row = min(size, 8)
    width = per_row * (_CELL + _GAP) + _GAP + 16
    height = -(-size // per_row) * (_CELL + _GAP) + _GAP + 30
    columns = max(1, (_WIDTH - 2 * _MARGIN + 16) // (width + 16))
    parts: list[str] = []
    for place, node in enumerate(shown):
        x = _MARGIN + place % columns * (width + 16)
        y = top + place // columns * (height + 16)
        parts.append(_box(x, y, width, height, "#ffffff", line=_FRAME))
        parts.append(_text(x + 10, y + 20, machine.where_node(node)))
        parts += _node(machine, roles, node * size, per_row, x + 8 + _GAP / 2, y + 30)
    bottom = top + -(-len(shown) // columns) * (height + 16)
    if hidden := total - len(shown):
        busy = len(used) - len([node for node in used if node in shown])
        words = f"and {hidden} more node{'s' if hidden > 1 else ''}, {busy} of them with roles"
        parts.append(_text(_MARGIN, bottom + 12, words, colour="#52606d"))
        bottom += 22
    return parts, bottom


def _node(
    machine: Machine, roles: dict[int, tuple[str, int]], first: int, per_row: int, x: float, y: float
) -> Iterator[str]:
    """The devices of one node; what is packed together inside it (a package, a card group) gets a frame."""
    packed = machine.sizes[0] if machine.sizes[0] < machine.node_size else 0
    for local in range(machine.node_size):
        left = x + local % per_row * (_CELL + _GAP)
        above = y + local // per_row * (_CELL + _GAP)
        if packed and local % packed == 0:
            wide = min(packed, per_row) * (_CELL + _GAP) - _GAP
            yield _box(left - 2, above - 2, wide + 4, _CELL + 4, "none", line="#cbd2d9")
        yield _device(left, above, roles.get(first + local), first + local)


def _rounds(plan: Plan, top: float) -> tuple[list[str], float]:
    """One round of each way to decode, to scale."""
    left, width = 210.0, _WIDTH - 210.0 - 250.0
    scale = width / max(speed.round_ms for speed in plan.speeds)
    parts = [_text(_MARGIN, top, "One round, milliseconds", size=15, weight="600")]
    y = top + 14
    for speed in plan.speeds:
        bars = _bars(plan, speed.mode)
        parts.append(_text(_MARGIN, y + 19, {"none": "plain", "sd": "sd", "ssd": "ssd"}[speed.mode], weight="600"))
        for lane, start, length, colour, words in bars:
            wide = max(2.0, length * scale)
            bar_y = y + lane * 30
            parts.append(_box(left + start * scale, bar_y, wide, 26, colour))
            label = f"{words} {length:.2f}"
            if wide > 8 * len(label):
                parts.append(_text(left + start * scale + 8, bar_y + 18, label, colour="#ffffff"))
            elif lane or len(bars) == 1 or start == 0.0:
                parts.append(_text(left + start * scale + wide + 6, bar_y + 18, label))
        note = f"{speed.tokens_per_s:.0f} tokens/s, {speed.tokens_per_round:.2f} a round"
        parts.append(_text(_WIDTH - _MARGIN, y + 19, note, anchor="end"))
        y += 30 * (1 + max(lane for lane, *_ in bars)) + 12
    parts += _key(y + 6)
    return parts, y + 40


def _bars(plan: Plan, mode: str) -> list[tuple[int, float, float, str, str]]:
    """(lane, start, length, colour, word): the target's lane is 0, the speculator's is 1."""
    times = plan.times
    if mode == "none" or times.draft_ms is None:
        return [(0, 0.0, times.decode_ms, _VERIFY, "decode")]
    if mode == "sd":
        draft = next(speed.round_ms for speed in plan.speeds if speed.mode == "sd") - times.verify_ms
        return [(0, 0.0, draft, _DRAFT, "draft"), (0, draft, times.verify_ms, _VERIFY, "verify")]
    message, wide = times.message_ms or 0.0, times.wide_draft_ms or 0.0
    asked_after = message if plan.wish.temperature > 0.0 else 0.0  # a law is waited for: `Cost.hit_us`
    return [
        (0, asked_after, times.verify_ms, _VERIFY, "verify"),
        (1, 0.0, message, _MESSAGE, "message"),
        (1, message, wide, _DRAFT, "draft"),
    ]


def _key(y: float) -> Iterator[str]:
    x = float(_MARGIN)
    for colour, words in ((_VERIFY, "target"), (_DRAFT, "draft"), (_MESSAGE, "message")):
        yield _box(x, y, 14, 14, colour)
        yield _text(x + 20, y + 12, words)
        x += 40 + 9 * len(words)
