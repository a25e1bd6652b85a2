"""A streaming client of any OpenAI-compatible server, over asyncio and nothing else; notes when every piece arrives."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ssd_ascend.errors import ConfigError, SsdError

_PATIENCE_S = 600.0


@dataclass(slots=True)
class Answer:
    """One streamed answer; times in nanoseconds of `time.perf_counter_ns`."""

    sent_ns: int
    arrivals_ns: list[int] = field(default_factory=list)
    """When each piece of text came; a piece may hold several tokens."""
    text: str = ""
    completion_tokens: int | None = None
    """As the server counted them; None when it did not say."""
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None

    @property
    def is_empty(self) -> bool:
        """The model had nothing to say: servers that know no `ignore_eos` may end before the first text."""
        return not self.arrivals_ns and self.finish_reason == "stop"

    @property
    def num_tokens(self) -> int:
        """Tokens; pieces where the server gives no usage."""
        return len(self.arrivals_ns) if self.completion_tokens is None else self.completion_tokens


class HttpError(SsdError):
    """A server that does not answer as asked; `status` is 0 when it was not HTTP at all."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """The API at a base URL, with or without its /v1."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of a server", remedy="give for example http://127.0.0.1:8000")
        self.url = url
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._key = api_key

    async def model(self) -> str:
        """The first model the server offers."""
        text = "".join([line async for line in self._lines("GET", "/models", None)])
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise HttpError(f"{self.url} lists no model: {text[:200]}") from error

    async def stream(self, body: dict[str, Any], *, chat: bool) -> Answer:
        """Send a request and take its answer to the end. Failures are noted in the answer, not raised."""
        answer = Answer(time.perf_counter_ns())
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._take(answer, "/chat/completions" if chat else "/completions", body)
        except (HttpError, OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            answer.failure = str(error) or type(error).__name__
        return answer

    async def _take(self, answer: Answer, path: str, body: dict[str, Any]) -> None:
        done = False
        async for line in self._lines("POST", path, body | {"stream": True}):
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if not data:
                continue
            if data == "[DONE]":
                done = True
                continue
            _note(answer, json.loads(data))
        if not done:
            raise HttpError("the stream ended without [DONE]")

    async def _lines(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[str]:
        """The lines of a response's body as they come; HttpError for any status but 200."""
        context = ssl.create_default_context() if self._secure else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        try:
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, headers = await _head(reader)
            lines = _split(_chunks(reader, headers))
            if status != 200:
                told = " ".join([line async for line in lines])
                raise HttpError(f"{method} {self._base}{path}: status {status}: {told[:300]}", status=status)
            async for line in lines:
                yield line
        finally:
            writer.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self._base}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
        ]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode() + payload


def _note(answer: Answer, event: dict[str, Any]) -> None:
    if event.get("error"):
        raise HttpError(f"the server ended the stream: {event['error']}")
    for choice in event.get("choices") or ():
        piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if piece:
            answer.arrivals_ns.append(time.perf_counter_ns())
            answer.text += piece
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := event.get("usage"):
        answer.completion_tokens = usage.get("completion_tokens")
        answer.prompt_tokens = usage.get("prompt_tokens")


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readline()).decode("latin-1").split(maxsplit=2)
    if len(first) < 2 or not first[1].isdigit():
        raise HttpError("the server does not speak HTTP")
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(first[1]), headers


async def _chunks(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The pieces of a body: chunked, of a stated length, or up to the end of the connection."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


async def _split(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")
