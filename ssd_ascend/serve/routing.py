"""Which replica a request goes to: the one that holds most of its prompt already, unless that one is crowded.

Pure values, no network; `router.py` asks. A prompt is cut into blocks of characters, each named by all before it, so
that equal names mean equal beginnings; a replica is taken to hold what it was last sent.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

BLOCK_CHARS = 256
_MOST_BLOCKS = 128
_REMEMBERED = 20_000
"""Blocks of each replica; about 5 MB of text."""
_SLACK = 4
"""A replica that holds the beginning may have so many more requests under way than the idlest."""


@dataclass(eq=False)
class Replica:
    """One server behind the router."""

    name: str
    host: str
    port: int
    is_ready: bool = False
    in_flight: int = 0
    requests: int = 0
    reason: str = "starting"
    _held: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)

    def held_blocks(self, names: Rows[bytes]) -> int:
        """How many of the first blocks were sent here before."""
        return next((i for i, name in enumerate(names) if name not in self._held), len(names))

    def remember(self, names: Iterable[bytes]) -> None:
        """These blocks go there; the ones longest unused are forgotten."""
        for name in names:
            self._held[name] = None
            self._held.move_to_end(name)
        while len(self._held) > _REMEMBERED:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """It was restarted: nothing is held."""
        self._held.clear()

    @property
    def crowd(self) -> tuple[int, int, int]:
        """Order of idleness: under way, then held (an empty one gets the new conversation), then served."""
        return self.in_flight, len(self._held), self.requests


def choose(replicas: Rows[Replica], names: Rows[bytes]) -> Replica | None:
    """The replica for a prompt of these blocks; None when none is ready. `names` may be empty."""
    ready = [replica for replica in replicas if replica.is_ready]
    if not ready:
        return None
    idlest = min(ready, key=lambda replica: replica.crowd)
    holder = max(ready, key=lambda replica: (replica.held_blocks(names), -replica.in_flight))
    if holder.held_blocks(names) and holder.in_flight <= idlest.in_flight + _SLACK:
        return holder
    return idlest


def block_names(body: bytes) -> list[bytes]:
    """The names of a request's whole blocks; none when it is no JSON that the server would take, or short."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return []
    text = _prompt_text(request) if isinstance(request, dict) else ""
    names: list[bytes] = []
    name = b""
    for start in range(0, min(len(text) // BLOCK_CHARS, _MOST_BLOCKS) * BLOCK_CHARS, BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS].encode("utf-8", "surrogatepass")
        name = hashlib.blake2b(name + block, digest_size=16).digest()
        names.append(name)
    return names


def _prompt_text(request: dict[str, Any]) -> str:
    """What the model will read, near enough: equal beginnings give equal beginnings."""
    if "messages" in request:
        tools = request.get("tools") or ""
        messages = request["messages"] if isinstance(request["messages"], list) else []
        return "".join([json.dumps(tools), *(json.dumps(message, ensure_ascii=False) for message in messages)])
    prompt = request.get("prompt", "")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else json.dumps(prompt)
