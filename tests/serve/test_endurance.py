"""Ten thousand requests, right and wrong, and a thousand clients that leave: nothing breaks, nothing leaks. Slow.

Against the scripted engine, and against a real one: a tiny target, its draft worker, and grammars among the requests.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ssd_ascend.serve.reference import BODIES
from tests.serve.conftest import TEMPLATE
from tests.serve.live import PATIENCE_S, LiveServer
from tests.serve.test_streams import open_stream
from tests.structured.models import EOS, write_bytes_pair
from tests.unit.text_toys import byte_level_backend, write_directory

pytestmark = pytest.mark.slow

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
RIGHT: dict[str, list[Any]] = {
    "prompt": ["hi", "", ["a", "b"], [5, 6], [[5], [6, 7]], "世界" * 20],
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "x"}, {"role": "tool", "content": "y"}],
    ],
    "tokens": [[1, 2, 3], []],
    "max_tokens": [1, 3, 8],
    "n": [1, 2],
    "stream": [True, False],
    "temperature": [0, 0.5, 2],
    "top_p": [0.1, 1.0],
    "top_k": [0, 5],
    "seed": [7],
    "stop": ["h", ["a", "b"]],
    "logprobs": [True, 2],
    "logit_bias": [{"5": 3.0}],
    "frequency_penalty": [0.5],
    "response_format": [{"type": "json_object"}, {"type": "text"}],
    "regex": ["[a-z]{1,9}"],
    "grammar": ['start: "a" | "b"'],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["auto", "none", "required"],
    "speculation": [True, False],
    "return_token_sources": [True],
}
JUNK: list[Any] = [None, True, -1, 1 << 70, 1.5, "", "x", [], {}, [[]], {"a": [1]}, "\ud800", "\x00", {"type": "x"}]
REQUIRED = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}


def made_up(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: about half are right, others have a wrong value, a wrong field, or are no JSON."""
    path = rng.choice(PATHS)
    body: dict[str, Any] = {REQUIRED[path]: rng.choice(RIGHT[REQUIRED[path]]), "max_tokens": rng.choice([1, 3, 8])}
    fitting = [name for name in RIGHT if name in BODIES[path].model_fields]
    for name in rng.sample(fitting, min(rng.randrange(4), len(fitting))):
        body[name] = rng.choice(RIGHT[name])
    if rng.random() < 0.3:
        body[rng.choice([*RIGHT, "nonsense", "model"])] = rng.choice(JUNK)
    if not path.startswith("/v1"):
        body.pop("max_tokens", None)
    content = json.dumps(body).encode()
    return path, content[: rng.randrange(len(content))] if rng.random() < 0.05 else content


@pytest.fixture(scope="module", params=["scripted", "real"])
def server(
    request: pytest.FixtureRequest, parrot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    if request.param == "scripted":
        flags, module = ["--model", str(parrot)], "tests.serve.fake_server"
    else:
        pair = write_bytes_pair(tmp_path_factory.mktemp("pair"))
        write_directory(pair / "target", byte_level_backend(), eos_token=EOS, chat_template=TEMPLATE)
        flags = ["--model", str(pair / "target"), "--draft", str(pair / "model"), "--speculator", "ssd"]
        flags += ["--num-kv-blocks", "256", "--max-num-seqs", "8", "--threads", "1", "--draft-threads", "1"]
        module = "ssd_ascend.serve"
    with LiveServer(*flags, module=module) as live:
        yield live.wait_until_ready()
        assert live.stop() == 0


def resident_mb(server: LiveServer) -> dict[str, float]:
    """Memory of the front end and of every process below it."""
    found, pending = {}, [server.process.pid]
    while pending:
        pid = pending.pop()
        status = Path(f"/proc/{pid}/status").read_text()
        name = "front end" if pid == server.process.pid else f"child {len(found)}"
        found[name] = int(status.split("VmRSS:")[1].split()[0]) / 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            pending += map(int, (task / "children").read_text().split())
    return found


def test_ten_thousand_requests(server: LiveServer, record_property: Any) -> None:
    seen: Counter[int] = Counter()

    def work(seed: int) -> Counter[int]:
        rng, own = random.Random(seed), Counter[int]()
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            for _ in range(250):
                path, content = made_up(rng)
                answer = client.post(path, content=content)
                own[answer.status_code] += 1
                assert answer.status_code in (200, 400, 404), (path, content, answer.text)
                if answer.status_code != 200:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, content
        return own

    before: dict[str, float] = {}
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, 40, 4):  # a thousand at a time
            seen.update(sum(pool.map(work, range(start, start + 4)), Counter()))
            server.wait_until_idle()  # and no block is in use
            if start == 0:
                before = resident_mb(server)
    after = resident_mb(server)
    growth = {name: round(100 * (after[name] / before[name] - 1), 2) for name in before}
    record_property("statuses", dict(seen))
    record_property("growth_percent", growth)
    print(dict(seen), growth, after)
    assert sum(seen.values()) == 10_000
    assert seen[200] > 3000
    assert all(percent < 2 for percent in growth.values()), growth


def test_a_thousand_clients_that_leave(server: LiveServer) -> None:
    before: dict[str, float] = {}
    for batch in range(80):
        if batch == 30:  # what is made once was made: a server that starts with this test has grown by a tenth
            server.wait_until_idle()
            before = resident_mb(server)
        connections = [open_stream(server, f"SLOW {batch} {i} ", 400) for i in range(20)]
        if batch % 2:
            connections[0].getresponse().readline()
        for connection in connections:
            connection.close()
    server.wait_until_idle()
    growth = {name: round(100 * (size / before[name] - 1), 2) for name, size in resident_mb(server).items()}
    print(growth)
    assert all(percent < 3 for percent in growth.values()), growth
