"""How to serve, as one frozen value: made from the command line in `__main__`, read by the rest of the room."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ssd_ascend.errors import ConfigError

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+")
"""What a browser's `Origin` can be, or any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses, keys and limits. Times are in seconds; None means no limit.

    drain_s bounds how long requests may go on after SIGTERM, failure_grace_s how long a server whose engine is lost for
    good still answers 503. max_queue: sequences that may wait for room in the batch. rate_limit: requests a minute and
    key (or client address, where there are no keys). read_timeout_s: how long a client may take to send the head of its
    request, and then its body. write_timeout_s: how long it may leave an answer unread once all buffers are full.
    request_timeout_s: how long an answer may take. max_restarts: engines that may be lost within ten minutes.
    step_timeout_s: how long an engine with work may take to end a step before it counts as lost; 0 is for ever, None
    what suits the device.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    model_name: str | None = None
    tool_format: str = "auto"
    cors_origins: tuple[str, ...] = ()
    has_page: bool = True
    has_access_log: bool = False
    max_queue: int | None = None
    max_body_bytes: int = 8 << 20
    rate_limit: int | None = None
    read_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    drain_s: float = 30.0
    failure_grace_s: float = 2.0
    max_restarts: int = 3
    step_timeout_s: float | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    admin_key: str | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_restarts"):
            _at_least(name, getattr(self, name), 0)
        for name in ("max_body_bytes", "rate_limit"):
            _at_least(name, getattr(self, name), 1)
        for name in ("read_timeout_s", "write_timeout_s", "request_timeout_s"):
            _at_least(name, getattr(self, name), 0.001)
        for name in ("drain_s", "failure_grace_s", "step_timeout_s"):
            _at_least(name, getattr(self, name), 0)
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin is {origin!r}, which no browser calls itself",
                    remedy="give scheme and host, such as https://chat.example, with the port if it has one; or *",
                )
        keys = (*self.api_keys, *(() if self.admin_key is None else (self.admin_key,)))
        if not all(key.strip() for key in keys):
            raise ConfigError("a key is empty: it would keep nobody out", remedy="give it some text, or leave it out")
        if self.admin_port is not None and self.admin_key is None:
            raise ConfigError(
                "the admin endpoint has no key", remedy="set SSD_ADMIN_KEY or --admin-key; it differs from the API key"
            )
        if self.admin_key is not None and self.admin_key in self.api_keys:
            raise ConfigError("the admin key is also an API key", remedy="choose another for one of them")


def _at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not low <= value < math.inf:
        raise ConfigError(f"{name} is {value}: it must be a number, and at least {low:g}")
