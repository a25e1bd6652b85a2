"""Servers under load: N streaming clients at once, against any OpenAI-compatible URL or a server of our own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench import report
from bench.client import Answer, Server
from bench.offline import load_texts
from bench.server import OwnServer
from bench.summary import Row
from ssd_ascend import env
from ssd_ascend.errors import ConfigError, SsdError
from ssd_ascend.flags import add_engine_arguments, engine_config, positive_list

_MAX_SLOWEST_TO_MEDIAN = 3.0
"""No client may wait longer than this many times the median for its first token."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve every batch of clients and return the result as it is written to JSON."""
    given = vars(args)
    counts = positive_list(given.get("clients") or given.get("batch", "1"), "--clients")
    if given.get("random"):
        raise ConfigError("random tokens cannot be sent as text", remedy="leave --random out")
    texts = [text for group in load_texts(args) for text in group.texts]
    load = report.load_average()
    with contextlib.ExitStack() as stack:
        server: OwnServer | None = None
        if (url := given.get("openai_url")) is None:
            server = stack.enter_context(OwnServer(*engine_flags(args)))
            url = server.url
        api = Server(url, api_key=given.get("api_key") or env.api_key())
        model, rows = asyncio.run(_serve_all(api, args, counts, texts, server))
    failures = [reason for row in rows for reason in _complaints(row)]
    device = "of the server" if server is None else str(engine_config(args, is_final=False).device or "cpu")
    return report.result(
        rows, device=device, load=(load, report.load_average()), model=model, prompts=len(texts),
        output_len=given.get("output_len", 128), temperature=given.get("temperature", 0.0), failures=failures,
        url=given.get("openai_url"),
    )  # fmt: skip


def _complaints(row: Row) -> list[str]:
    found = []
    if row["failed"]:
        found.append(
            f"{row['clients']} clients: {row['failed']} of {row['requests']} requests failed: {row['failure']}"
        )
    ratio = float(row["slowest_to_median"] or 0)
    if ratio > _MAX_SLOWEST_TO_MEDIAN:
        found.append(f"{row['clients']} clients: the slowest first token took {ratio:.1f} times the median")
    return found


async def _serve_all(
    api: Server, args: argparse.Namespace, counts: Sequence[int], texts: Sequence[str], server: OwnServer | None
) -> tuple[str, list[Row]]:
    try:
        model = await api.model()
    except OSError as error:
        raise SsdError(f"{api.url} cannot be reached: {error}") from error
    chat = bool(getattr(args, "chat", False))
    body = await _accepted_body(api, _body(args, model), texts[0], chat=chat)
    first_ns = time.perf_counter_ns()
    rows = []
    for count in counts:
        requests = [texts[i % len(texts)] for i in range(count * getattr(args, "repeat", 1))]
        began = time.perf_counter_ns()
        answers = await _crowd(api, body, requests, count, chat=chat)
        row = summarise_answers(count, answers, (time.perf_counter_ns() - began) / 1e9)
        if server is not None:
            row["start_to_ready_s"] = round((server.ready_ns - server.began_ns) / 1e9, 2)
            row["start_to_first_token_s"] = round((first_ns - server.began_ns) / 1e9, 2)
            row["peak_rss_mb"] = server.memory.peak_mb
        rows.append(row)
    return model, rows


def _body(args: argparse.Namespace, model: str) -> dict[str, Any]:
    given = vars(args)
    return {
        "model": given.get("served_model_name", model),
        "max_tokens": given.get("output_len", 128),
        "temperature": given.get("temperature", 0.0),
        "stream_options": {"include_usage": True},
        "ignore_eos": not given.get("respect_eos", False),
    }


async def _accepted_body(api: Server, body: dict[str, Any], text: str, *, chat: bool) -> dict[str, Any]:
    """`body`, less the extensions that this server refuses; the probe is the warm-up and the server's first token."""
    refusal = None
    for extensions in (("ignore_eos", "stream_options"), ("stream_options",), ()):
        tried = {name: value for name, value in body.items() if name in extensions or name not in (
            "ignore_eos", "stream_options")}  # fmt: skip
        answer = await api.stream(tried | {"max_tokens": 1} | _prompt(text, chat=chat), chat=chat)
        if answer.failure is None:
            return tried
        refusal = answer.failure
        if "status 400" not in refusal and "status 422" not in refusal:
            break
    raise SsdError(f"{api.url} does not serve: {refusal}")


def _prompt(text: str, *, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


async def _crowd(api: Server, body: dict[str, Any], texts: Sequence[str], clients: int, *, chat: bool) -> list[Answer]:
    """`clients` at a time, each sending its next request when its last has been answered."""
    waiting = iter(texts)

    async def client() -> list[Answer]:
        return [await api.stream(body | _prompt(text, chat=chat), chat=chat) for text in waiting]

    return [answer for answers in await asyncio.gather(*(client() for _ in range(clients))) for answer in answers]


def summarise_answers(clients: int, answers: Sequence[Answer], seconds: float) -> Row:
    """One row: throughput, and percentiles of the first token and of the gaps between pieces of text."""
    good = [answer for answer in answers if answer.failure is None and answer.arrivals_ns]
    empty = [answer for answer in answers if answer.failure is None and answer.is_empty]
    failures = [answer.failure or "no text came" for answer in answers if answer not in good and answer not in empty]
    row: Row = {"mode": "server", "batch": clients, "clients": clients, "requests": len(answers)}
    row |= {"failed": len(failures), "failure": failures[0] if failures else None, "slowest_to_median": None}
    row["empty"] = len(empty) or None
    if not good:
        return row | {"tokens_per_s": 0.0}
    tokens = sum(answer.num_tokens for answer in good)
    row |= {"tokens": tokens, "tokens_per_s": round(tokens / seconds, 2), "seconds": round(seconds, 3)}
    first = sorted((answer.arrivals_ns[0] - answer.sent_ns) / 1e6 for answer in good)
    gaps = sorted(
        (b - a) / 1e6 for answer in good for a, b in zip(answer.arrivals_ns, answer.arrivals_ns[1:], strict=False)
    )
    for name, values in (("ttft_ms", first), ("itl_ms", gaps)):
        for percent in (50, 90, 99):
            row[f"{name}_p{percent}"] = round(percentile(values, percent), 2) if values else None
    row["ttft_ms_max"] = round(first[-1], 2)
    row["slowest_to_median"] = round(first[-1] / statistics.median(first), 3)
    return row


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, with linear interpolation."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The engine's flags among `args` as a command line, for a server of our own; one mode only."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_engine_arguments(parser)
    values = dict(vars(args))
    if "modes" in values:
        speculator, *rest = values["modes"].split(":")
        values |= {"speculator": speculator} | dict(zip(("drafter", "lookahead"), rest, strict=False))
    if "," in str(values.get("speculator", "")):
        raise ConfigError(f"a server runs in one mode, not {values['modes']!r}", remedy="name one")
    flags: list[str] = []
    for action in parser._actions:
        value = values.get(action.dest)
        if value is None:
            continue
        flags.append(action.option_strings[0])
        if action.nargs != 0:
            flags.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return flags
