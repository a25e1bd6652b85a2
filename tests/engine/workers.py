"""Draft workers for the supervisor's tests, entered by name in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_ascend.errors import ConfigError
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello, Request
from tests.unit.plain_messages import answer


def hello(lookahead: int) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        target_vocab=100,
        draft_vocab=100,
        feature_width=0,
        lookahead=lookahead,
        drafter="model",
    )


def good(line: Transport, config: Mapping[str, Any]) -> None:
    """Says hello, once there is a file `begin` if one is named, answers, and leaves when asked; `lookahead` shows that
    the config arrived."""
    while "begin" in config and not Path(config["begin"]).exists():
        time.sleep(0.01)
    line.send(hello(config["lookahead"]))
    while isinstance(message := line.recv(None), Request):
        line.send(answer(message.number))
    if config.get("stubborn"):
        time.sleep(600.0)
    if "farewell" in config:
        with open(config["farewell"], "w", encoding="utf-8") as file:
            file.write(type(message).__name__)


def says_nothing(line: Transport, config: Mapping[str, Any]) -> None:
    time.sleep(600.0)


def cannot(line: Transport, config: Mapping[str, Any]) -> None:
    raise ConfigError("the head lacks a tensor", remedy="complete it")


def prints(line: Transport, config: Mapping[str, Any]) -> None:
    """Writes where answers go, as careless libraries do."""
    print("careless", flush=True)
    good(line, config)
