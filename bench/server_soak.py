"""`python -m bench.server_soak --minutes 10 --json FILE`: our server under mixed clients and mishaps, for a while.

Clients chat, stream, ask for JSON, leave in the middle, and send nonsense; meanwhile worker and engine are killed and
the speculator is tuned. Answers at temperature 0 must stay the same throughout, nothing may fail but what an engine's
death explains, and in the end no block is in use. Memory, threads and descriptors are looked at on the way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from bench import report
from bench.server import OwnServer, process_tree
from bench.summary import Row

_CLIENTS = 8
_MARKS = 20
_FLAGS = (
    *("--model", "smollm2-135m-eagle3", "--speculator", "ssd", "--lookahead", "4", "--max-num-seqs", "8"),
    *("--threads", "1", "--draft-threads", "1"),
)
_PATIENCE_S = 300.0
_AFTER_DEATH_S = 10.0
"""How long after an engine is back its death may still explain an error."""
_QUESTIONS = ("Why is the sky blue?", "Count to ten.", "Name three rivers.", "What is 7 times 8?")
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_MISHAPS: tuple[tuple[float, str, Any], ...] = (
    (0.10, "tune", {"lookahead": 2}),
    (0.20, "kill", "worker"),
    (0.30, "tune", {"enabled": False}),
    (0.35, "kill", "engine"),
    (0.45, "tune", {"enabled": True, "lookahead": 4}),
    (0.55, "kill", "worker"),
    (0.65, "kill", "engine"),
)
"""By the share of the time that has passed."""


class Soak:
    """One run against a server that is ready."""

    def __init__(self, url: str, admin: tuple[str, str], pid: int, seconds: float) -> None:
        self.failures: list[str] = []
        self.seen: Counter[str] = Counter()
        self.rows: list[Row] = []
        self._pid, self._seconds = pid, seconds
        self._http = httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=httpx.Limits(max_connections=64))
        self._admin_url, self._admin_key = admin
        self._expected: dict[str, str] = {}
        self._room = 0
        """Tokens of a prompt and its answer."""
        self._excused_until = 0.0
        self._began = time.monotonic()

    async def run(self) -> None:
        """All of it; `failures` says what went wrong."""
        async with self._http:
            self._room = (await self._post({"prompt": "x"}, "/tokenize"))["max_model_len"]
            for question in _QUESTIONS:
                self._expected[question] = await self._ask(question)
            self._began = time.monotonic()
            await asyncio.gather(self._operate(), self._watch(), *map(self._client, range(_CLIENTS)))
            await self._wait_until_idle()
            self._look()

    @property
    def _share(self) -> float:
        return (time.monotonic() - self._began) / self._seconds

    # -- clients -----------------------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        acts: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "repeat": self._repeat, "stream": self._stream, "json": self._json, "leave": self._leave,
            "several": self._several, "long": self._long, "nonsense": self._nonsense,
        }  # fmt: skip
        while self._share < 1:
            name = rng.choice(list(acts))
            try:
                await acts[name](rng)
                self.seen[name] += 1
            except (httpx.HTTPError, EngineGoneError, AssertionError, ValueError, jsonschema.ValidationError) as error:
                excused = isinstance(error, EngineGoneError) and time.monotonic() < self._excused_until
                self.seen["ended by an engine's death" if excused else "failed"] += 1
                if not excused:
                    self.failures.append(f"{name} at {self._share:.0%}: {type(error).__name__}: {error}"[:300])

    async def _post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        found = await self._http.post(path, json=body)
        if found.status_code in (500, 503):
            await asyncio.sleep(0.5)
            raise EngineGoneError(found.text)
        assert found.status_code == 200, found.text
        return found.json()

    async def _ask(self, question: str) -> str:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
        return str((await self._post(body))["choices"][0]["message"]["content"])

    async def _repeat(self, rng: random.Random) -> None:
        question = rng.choice(_QUESTIONS)
        said = await self._ask(question)
        assert said == self._expected[question], f"{question} {said!r}, and first {self._expected[question]!r}"

    async def _stream(self, rng: random.Random, leave_after: int | None = None) -> None:
        body = {"prompt": f"Story {rng.randrange(99)}: once", "max_tokens": rng.randrange(8, 64), "stream": True}
        body["seed"] = rng.randrange(1 << 30)
        events = 0
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code in (500, 503):
                raise EngineGoneError(str(await answer.aread()))
            last = ""
            async for line in answer.aiter_lines():
                events += bool(line)
                last = line or last
                if leave_after is not None and events > leave_after:
                    return
        if '"error"' in last:
            raise EngineGoneError(last)
        assert last == "data: [DONE]", last

    async def _leave(self, rng: random.Random) -> None:
        await self._stream(rng, leave_after=rng.randrange(3))

    async def _json(self, rng: random.Random) -> None:
        format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON, "strict": True}}
        body = {"messages": [{"role": "user", "content": "A person as JSON."}], "response_format": format_}
        choice = (await self._post({**body, "max_tokens": 96, "seed": rng.randrange(99)}))["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), _PERSON)

    async def _several(self, rng: random.Random) -> None:
        body = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 8, "logprobs": 2, "stop": ["."]}
        assert len((await self._post({**body, "temperature": rng.random()}, "/v1/completions"))["choices"]) == 4

    async def _long(self, rng: random.Random) -> None:
        words = rng.randrange(self._room // 60, self._room // 15)  # ten bytes each, and no token is less than one
        body = {"prompt": f"{rng.randrange(9)} " + "and so on " * words, "max_tokens": 4}
        assert (await self._post(body, "/v1/completions"))["usage"]["prompt_tokens"] > words

    async def _nonsense(self, rng: random.Random) -> None:
        body = rng.choice([b"{", b'{"prompt": 3}', b'{"prompt": "x", "top_p": 7}', b'{"prompt": "' + b"a" * 4_000_000])
        found = await self._http.post("/v1/completions", content=body)
        assert found.status_code == 400, found.text

    # -- the operator ------------------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        for share, what, how in _MISHAPS:
            await asyncio.sleep(max(0.0, (share - self._share) * self._seconds))
            if what == "kill":
                await self._kill(how)
            else:
                headers = {"Authorization": f"Bearer {self._admin_key}"}
                found = await self._http.post(f"{self._admin_url}/admin/speculation", json=how, headers=headers)
                assert found.status_code == 200, found.text
            self.seen[f"{what} {how}"] += 1

    async def _kill(self, who: str) -> None:
        processes = process_tree(self._pid)
        if len(processes) < 3:
            self.failures.append(f"there was no {who} to kill at {self._share:.0%}")
            return
        if who == "engine":
            self._excused_until = time.monotonic() + _PATIENCE_S
        os.kill(processes[1 if who == "engine" else 2], signal.SIGKILL)
        if who == "engine":
            while processes[1] in process_tree(self._pid) or (await self._http.get("/health")).status_code != 200:
                await asyncio.sleep(0.2)
            self._excused_until = time.monotonic() + _AFTER_DEATH_S

    async def _watch(self) -> None:
        for mark in range(1, _MARKS):
            await asyncio.sleep(max(0.0, (mark / _MARKS - self._share) * self._seconds))
            self._look()

    def _look(self) -> None:
        processes = process_tree(self._pid)
        sizes = [own_mb(pid) for pid in processes]
        self.rows.append(
            {
                "mode": "server", "batch": _CLIENTS, "seconds": round(time.monotonic() - self._began, 1),
                "requests": sum(self.seen.values()), "front_end_mb": sizes[0],
                "engine_mb": sizes[1] if len(sizes) > 1 else None, "worker_mb": sizes[2] if len(sizes) > 2 else None,
                "descriptors": len(list(Path(f"/proc/{self._pid}/fd").iterdir())),
                "threads": len(list(Path(f"/proc/{self._pid}/task").iterdir())), "processes": len(processes),
            }
        )  # fmt: skip

    async def _wait_until_idle(self) -> None:
        names = ("ssd_requests_running", "ssd_requests_waiting", "ssd_kv_blocks_used")
        for _ in range(600):
            lines = (await self._http.get("/metrics")).text.splitlines()
            left = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(names)}
            if not any(left.values()):
                return
            await asyncio.sleep(0.1)
        self.failures.append(f"something is left behind: {left}")


class EngineGoneError(Exception):
    """The server says that its engine failed, or is being replaced."""


def own_mb(pid: int) -> float:
    """Memory that only this process has: shared pages count more or less as neighbours come and go. 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return round(int(found[0]) / 1024, 1) if found else 0.0


def growth_percent(rows: Sequence[Row], name: str, *, since: float) -> float:
    """By how much a size grew from the share `since` of the way to the end."""
    first = rows[int(len(rows) * since)][name]
    return round(100 * (float(rows[-1][name] or 0) / float(first or 1) - 1), 2)


def measure(minutes: float, flags: Sequence[str]) -> dict[str, Any]:
    """Start a server with `flags`, soak it, and return the result as it is written to JSON."""
    load, key = report.load_average(), secrets.token_hex(8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = ("--admin-port", str(port), "--admin-key", key, "--max-restarts", "9")
    with OwnServer(*flags, *own) as server:
        soak = Soak(server.url, (f"http://127.0.0.1:{port}", key), server.pid, minutes * 60)
        asyncio.run(soak.run())
    growth = {
        "front_end_mb": growth_percent(soak.rows, "front_end_mb", since=0.25),
        "engine_mb": growth_percent(soak.rows, "engine_mb", since=0.8),  # the last one was started at 0.65
        "worker_mb": growth_percent(soak.rows, "worker_mb", since=0.8),
    }
    return report.result(
        soak.rows, device="cpu", load=(load, report.load_average()), minutes=minutes, flags=list(flags),
        seen=dict(soak.seen), growth_percent=growth, failures=soak.failures,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server_soak", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    args, flags = parser.parse_known_args(argv)
    result = measure(args.minutes, flags or _FLAGS)
    given = list(sys.argv[1:] if argv is None else argv)
    result["command"] = shlex.join(["python", "-m", "bench.server_soak", *given])
    if args.json is not None:
        report.write_json(args.json, result)
    told = {"seen": result["seen"], "growth_percent": result["growth_percent"], "failures": result["failures"][:9]}
    print(json.dumps(told, indent=1))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
