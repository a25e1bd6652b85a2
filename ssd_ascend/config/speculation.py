"""How drafting is done: the two free axes (speculator, drafter) and their numbers. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Literal

from ssd_ascend.config.counts import check_count, check_threads
from ssd_ascend.errors import ConfigError

MAX_LOOKAHEAD = 32
MAX_FAN_OUT = 64
_PLACES = {"thread": "in a thread", "inprocess": "in the target's own thread"}
_OWN_WORKER: Mapping[str, str | None] = {"worker": "auto", "worker_line": "auto", "draft_device": None}
_HOST = re.compile(r"[^\s/@?#\[\]\\]+")
FanOutSpec = int | tuple[int, ...] | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Which speculator and drafter, and how far and how wide they guess.

    `speculator` and `drafter` are registry keys. `draft` is whatever `--draft` accepts (None for drafters without
    weights). `lookahead` is K, or "auto". `fan_out` is guesses per accepted length: one number for all, a list of K +
    1, or "auto". `on_miss` is what an `ssd` row gets when the cache did not foresee its outcome. `cache_bias` is C of
    cache-aware sampling (Saguaro, arXiv 2603.03251 definition 14): 1 leaves the draft law alone. `draft_temperature`
    None uses the request's. `draft_threads` None gives the worker half of the target's CPU threads. `worker` "process"
    gives the drafter a process of its own, "thread" a thread of ours and a stream of its own on our device; "auto" is a
    thread where target and draft share a device whose streams run side by side. `worker_line` says what carries a
    process's messages: "auto" is a socket, and features stay where they are if devices read one another's memory;
    "device" carries all over the devices, or asks for as much of it as they can do. `speculators` (each "host:port")
    draft instead of a worker of our own.
    """

    speculator: str = "none"
    drafter: str = "model"
    draft: str | None = None
    lookahead: int | Literal["auto"] = 5
    fan_out: FanOutSpec = 3
    on_miss: Literal["auto", "draft", "ngram", "decline"] = "auto"
    cache_bias: float = 1.0
    draft_temperature: float | None = None
    draft_device: str | None = None
    draft_dtype: str = "auto"
    draft_threads: int | None = None
    draft_rope: Literal["draft", "target", "auto"] = "draft"
    branch_lowering: Literal["auto", "tree_mask", "rows"] = "auto"
    worker: Literal["auto", "process", "thread", "inprocess"] = "auto"
    worker_line: Literal["auto", "socket", "device"] = "auto"
    worker_timeout_s: float = 10.0
    draft_kv_blocks: int | None = None
    speculators: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.lookahead != "auto" and not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise ConfigError(
                f"lookahead is {self.lookahead}", remedy=f"give 1 to {MAX_LOOKAHEAD}, 'auto', or --speculator none"
            )
        if not 0.0 < self.cache_bias <= 1.0:
            raise ConfigError(f"cache_bias is {self.cache_bias}", remedy="give a number above 0, at most 1")
        if self.draft_temperature is not None and not 0.0 <= self.draft_temperature <= 100.0:
            raise ConfigError(f"draft_temperature is {self.draft_temperature}", remedy="give 0 to 100")
        check_threads("draft_threads", self.draft_threads)
        check_count("draft_kv_blocks", self.draft_kv_blocks)
        if not 0.0 < self.worker_timeout_s < float("inf"):
            raise ConfigError(
                f"worker_timeout_s is {self.worker_timeout_s}", remedy="give a positive number of seconds"
            )
        self._check_fan_out()
        self._check_worker()
        self._check_speculators()

    def _check_worker(self) -> None:
        """What is said of the worker's place must be true of one place."""
        _, number = self.draft_place
        if self.worker in _PLACES and self.worker_line != "auto":
            raise ConfigError(
                f"worker_line is {self.worker_line!r}, but a worker {_PLACES[self.worker]} has no line",
                remedy="leave worker_line out, or make worker 'process'",
            )
        is_elsewhere = self.draft_device is not None if self.worker == "inprocess" else number > 0
        if self.worker in _PLACES and is_elsewhere:
            raise ConfigError(
                f"draft_device is {self.draft_device!r}, but a worker {_PLACES[self.worker]} is on the target's device",
                remedy="leave draft_device out, or make worker 'process'",
            )
        if self.speculators and self.own_worker:
            names = " and ".join(self.own_worker)
            raise ConfigError(
                f"{names} set, but where speculators draft there is no worker of our own",
                remedy=f"leave {names} out, or the speculators",
            )

    def _check_speculators(self) -> None:
        if self.speculators and self.speculator != "ssd":
            raise ConfigError(
                f"speculators are named, but the speculator is {self.speculator!r}", remedy="add --speculator ssd"
            )
        known: set[tuple[str, int]] = set()
        for address in self.speculators:
            named, _, port = address.rpartition(":")
            host = _host(named)
            if host is None or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise ConfigError(f"{address!r} is no address of a speculator", remedy="write it as host:port")
            if (host, int(port)) in known:
                raise ConfigError(f"the speculator {address!r} is named twice", remedy="name each of them once")
            known.add((host, int(port)))

    def _check_fan_out(self) -> None:
        guesses = (self.fan_out,) if isinstance(self.fan_out, int) else self.fan_out
        if guesses == "auto":
            return
        if any(not 0 <= f <= MAX_FAN_OUT for f in guesses) or not any(guesses):
            raise ConfigError(f"fan_out is {self.fan_out}", remedy=f"give numbers from 0 to {MAX_FAN_OUT}, one above 0")
        if isinstance(self.fan_out, tuple) and len(self.fan_out) != self._deepest + 1:
            raise ConfigError(
                f"fan_out lists {len(self.fan_out)} numbers for lookahead {self.lookahead}",
                remedy=f"give {self._deepest + 1}: one for each accepted length 0..{self._deepest}",
            )

    @property
    def enabled(self) -> bool:
        """True when anything is drafted at all."""
        return self.speculator != "none"

    @property
    def draft_place(self) -> tuple[str, int]:
        """Kind of the drafter's device, "" where it is the target's, and its number. Raises ConfigError."""
        if self.draft_device is None:
            return "", 0
        kind, colon, number = self.draft_device.partition(":")
        if not kind or (colon and not number.isdecimal()):
            raise ConfigError(f"draft_device is {self.draft_device!r}", remedy="write it as cpu, or with a number")
        return kind, int(number or 0)

    @property
    def own_worker(self) -> tuple[str, ...]:
        """The settings that say where a worker of our own is, and what carries its messages."""
        return tuple(name for name, default in _OWN_WORKER.items() if getattr(self, name) != default)

    @property
    def max_lookahead(self) -> int:
        """The most drafts a row can carry; sizes blocks, buffers and graphs."""
        return self._deepest if self.enabled else 0

    @property
    def _deepest(self) -> int:
        return 8 if self.lookahead == "auto" else self.lookahead


def _host(named: str) -> str | None:
    """A host as it is called: a name, or an IP address, in brackets or not where it is an IPv6 one; None for a URL, or
    whatever else no host is called."""
    bare = named[1:-1] if named.startswith("[") and named.endswith("]") else named
    if ":" in bare or bare != named:
        try:
            return str(IPv6Address(bare))
        except ValueError:
            return None
    return bare.lower() if _HOST.fullmatch(bare) else None
