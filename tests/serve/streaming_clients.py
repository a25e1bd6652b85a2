"""Clients that stream from a server until told to stop, as a program: `test_two_hosts.py` runs it on the target's host.

Arguments: the server's URL, a file with {prompt: answer}, tokens, seconds. All prompts are asked at once, again and
again. About every tenth of a second prints {"time", "hits", "tokens"}: the server's counter of hits, and the tokens
that came.
The last line is {"right", "answers", "errors"}.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import openai


@dataclass
class Tally:
    """What came so far."""

    tokens: int = 0
    answers: int = 0
    right: bool = True
    errors: list[str] = field(default_factory=list)


async def stream(client: openai.AsyncOpenAI, prompt: str, expected: str, tokens: int, tally: Tally, end: float) -> None:
    """One client: the same question until the time is over."""
    while time.monotonic() < end:
        text = ""
        try:
            answer = await client.completions.create(
                model="pair", prompt=prompt, max_tokens=tokens, temperature=0.0, stream=True
            )
            async for event in answer:
                text += event.choices[0].text if event.choices else ""
                tally.tokens += 1
        except openai.OpenAIError as error:
            tally.errors.append(str(error))
        tally.answers += 1
        tally.right &= text == expected


async def report(client: openai.AsyncOpenAI, url: str, tally: Tally, end: float) -> None:
    """Say where things stand."""
    while time.monotonic() < end:
        metrics = (await client._client.get(f"{url}/metrics")).text
        found = re.search(r"^ssd_speculation_cache_hits_total(?:\{[^}]*\})? ([0-9.e+]+)", metrics, re.MULTILINE)
        hits = float(found[1]) if found else 0.0
        print(json.dumps({"time": time.monotonic(), "hits": hits, "tokens": tally.tokens}), flush=True)
        await asyncio.sleep(0.1)


async def main(url: str, answers: dict[str, str], tokens: int, seconds: float) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0)
    tally, end = Tally(), time.monotonic() + seconds
    clients = [stream(client, prompt, expected, tokens, tally, end) for prompt, expected in answers.items()]
    await asyncio.gather(report(client, url, tally, end), *clients)
    print(json.dumps({"right": tally.right, "answers": tally.answers, "errors": tally.errors}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3]), float(sys.argv[4])))
