"""What operators set: limits, keys, logs, the configuration file, the admin endpoint. Servers of their own."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ssd_ascend import env
from ssd_ascend.errors import ConfigError
from ssd_ascend.flags import add_engine_arguments, engine_config
from ssd_ascend.log import fields
from ssd_ascend.serve.__main__ import main
from ssd_ascend.serve.addresses import url_of
from ssd_ascend.serve.arguments import flags_of_file, parse_arguments, server_config
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.errors import ApiError
from ssd_ascend.serve.launch import flags_for, launch, plan_for
from ssd_ascend.serve.limits import QueueLimit, RateLimit
from ssd_ascend.serve.roles import SECRET, Role, roles_of
from tests.serve.live import PATIENCE_S, LiveServer, eventually

HI = {"prompt": "hi", "max_tokens": 4}
COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_rate_of_each_key_is_its_own() -> None:
    now = 0.0
    limit = RateLimit(2, clock=lambda: now)
    assert limit.take("a")["x-ratelimit-remaining-requests"] == "1"
    limit.take("a")
    limit.take("b")
    with pytest.raises(ApiError) as refused:
        limit.take("a")
    assert refused.value.status == 429
    assert refused.value.headers["Retry-After"] == "30"
    now = 30.0
    limit.take("a")
    now = 10_000.0
    limit.take("a")
    limit.take("a")
    with pytest.raises(ApiError):
        limit.take("a")  # a long rest fills the bucket, and no more


def test_the_queue_tells_how_long_it_is() -> None:
    now = 0.0
    limit = QueueLimit(2, 4, clock=lambda: now)
    for second in (1.0, 2.0, 3.0, 4.0):  # about one answer a second
        now = second
        limit.saw_end()
    limit.check(5, 1)
    with pytest.raises(ApiError) as refused:
        limit.check(6, 5)
    assert refused.value.headers["Retry-After"] == "4"
    QueueLimit(None, 4).check(10**6, 1)


@pytest.fixture(scope="module")
def strict(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with all limits on, set by a file."""
    file = tmp_path_factory.mktemp("config") / "server.toml"
    settings = [
        f"model = {json.dumps(str(parrot))}",
        'served-model-name = "parrot"',
        'api_key = ["one", "two"]',
        "max-queue = 0",
        "max-num-seqs = 2",
        "rate-limit = 1000",
        "max-body-mb = 0.01",
        "read-timeout = 0.5",
        "request-timeout = 1.5",
        "access-log = true",
        'log-format = "json"',
        'cors-origin = ["https://page.example"]',
        "admin-port = 0",
        'admin-key = "boss"',
    ]
    file.write_text("\n".join(settings))
    with LiveServer("--config", str(file)) as live:
        live.admin_url = live.wait_for_line("admin endpoint on ").split()[-1]
        yield live.wait_until_ready()


def test_a_key_of_several(strict: LiveServer) -> None:
    for key in ("one", "two"):
        found = strict.post(COMPLETIONS, HI, headers=bearer(key))
        assert found.status_code == 200
        assert int(found.headers["x-ratelimit-limit-requests"]) == 1000
    assert strict.post(COMPLETIONS, HI, headers=bearer("three")).status_code == 401


def test_requests_have_ids_and_log_lines(strict: LiveServer) -> None:
    given = strict.post(COMPLETIONS, HI, headers={**bearer("one"), "x-request-id": "mine-1"})
    made = strict.post(COMPLETIONS, HI, headers={**bearer("one"), "x-request-id": "no/good"})
    assert given.headers["x-request-id"] == "mine-1"
    assert len(made.headers["x-request-id"]) == 32

    def lines() -> list[dict[str, Any]]:
        entries = [json.loads(text) for text in strict.errors]
        return [entry for entry in entries if entry.get("request_id") == "mine-1"]

    eventually(lambda: bool(lines()), "the line is written")
    (found,) = lines()
    assert (found["level"], found["path"], found["status"]) == ("info", COMPLETIONS, 200)
    assert "Bearer" not in json.dumps(found)


def test_large_and_slow_bodies(strict: LiveServer) -> None:
    large = strict.post(COMPLETIONS, {"prompt": "x" * 20_000}, headers=bearer("one"))
    assert large.status_code == 413
    host, port = strict.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\nContent-Length: 50\r\n\r\n{"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as slow:
        slow.sendall(head.encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    asks = head.replace("Content-Length: 50", "Expect: 100-continue\r\nContent-Length: 999999999")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as told_early:
        told_early.sendall(asks.encode())
        assert told_early.recv(4096).startswith(b"HTTP/1.1 413")


def test_answers_have_an_end(strict: LiveServer) -> None:
    body = {"prompt": "SLOW " * 4, "max_tokens": 1500}
    whole = strict.post(COMPLETIONS, body, headers=bearer("two"))
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "answer_timeout"
    events = list(strict.events(COMPLETIONS, body, headers=bearer("two")))
    assert len(events) > 3
    assert events[-1]["error"]["code"] == "answer_timeout"
    strict.wait_until_idle()


def test_a_full_queue_answers_429(strict: LiveServer) -> None:
    body = {"prompt": "SLOW " * 4, "max_tokens": 1500}
    threads = [
        threading.Thread(target=strict.post, args=(COMPLETIONS, body), kwargs={"headers": bearer("one")})
        for _ in (1, 2)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: strict.metric("ssd_requests_running") == 2, "two run")
    refused = strict.post(COMPLETIONS, HI, headers=bearer("one"))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    for thread in threads:
        thread.join(PATIENCE_S)
    strict.wait_until_idle()


def test_pages_of_other_sites(strict: LiveServer) -> None:
    def allowed(origin: str) -> str | None:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        found: str | None = strict.options(COMPLETIONS, headers=headers).headers.get("access-control-allow-origin")
        return found

    assert allowed("https://page.example") == "https://page.example"
    assert allowed("https://evil.example") is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://OWN"}, 200),
        ({"Origin": "http://OWN", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://chat.example", "Host": "chat.example"}, 200),  # a proxy that keeps the host
        ({"Origin": "https://chat.example", "X-Forwarded-Host": "chat.example, inner"}, 200),
        ({"Origin": "https://chat.example", "Sec-Fetch-Site": "same-origin"}, 200),  # one that tells nothing
        ({"Origin": "https://page.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another server of this machine
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://OWN", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_no_page_of_another_site_may_call(server: LiveServer, headers: dict[str, str], status: int) -> None:
    """Browsers send a POST of plain text from anywhere to anywhere, and only keep the answer from the page."""
    own = server.url.removeprefix("http://")
    told = {name: value.replace("OWN", own) for name, value in headers.items()}
    found = server.post(COMPLETIONS, HI, headers={**told, "Content-Type": "text/plain"})
    assert found.status_code == status
    assert "access-control-allow-origin" not in found.headers
    if status == 403:
        error = found.json()["error"]
        assert (error["code"], error["type"]) == ("origin_not_allowed", "invalid_request_error")
        assert "--cors-origin" in error["message"]
    assert server.get("/health", headers=told).status_code == 200


def test_a_page_that_is_named_may_call(strict: LiveServer) -> None:
    for origin, status in (("https://page.example", 200), ("https://page.example.evil.example", 403)):
        told = {**bearer("one"), "Origin": origin, "Sec-Fetch-Site": "cross-site"}
        assert strict.post(COMPLETIONS, HI, headers=told).status_code == status
        admin = strict.post("/admin/speculation", {}, base=strict.admin_url, headers={**told, **bearer("boss")})
        assert admin.status_code == 403


def test_the_admin_endpoint(strict: LiveServer) -> None:
    speculation = "/admin/speculation"
    boss: Any = {"headers": bearer("boss"), "base": strict.admin_url}
    assert strict.get(speculation, base=strict.admin_url, headers=bearer("one")).status_code == 401
    assert strict.get(speculation, headers=bearer("boss")).status_code == 404  # it is not on the API's address
    assert strict.get(speculation, **boss).json()["lookahead"] == 3
    assert strict.get("/admin/state", **boss).json()["health"]["status"] == "ready"

    def drafted(body: dict[str, Any]) -> int:
        usage = strict.post(COMPLETIONS, body, headers=bearer("two")).json()["usage"]["completion_tokens_details"]
        return int(usage["accepted_prediction_tokens"])

    body = {"prompt": "abcdefgh", "max_tokens": 9}
    assert drafted(body) == 6
    assert strict.post(speculation, {"enabled": False}, **boss).json()["enabled"] is False
    assert drafted(body) == 0
    changed = strict.post(speculation, {"lookahead": 1}, **boss).json()
    assert (changed["enabled"], changed["lookahead"], changed["max_lookahead"]) == (True, 1, 3)
    assert drafted(body) == 4
    assert strict.post(speculation, {"lookahead": 9}, **boss).json()["error"]["param"] == "lookahead"
    assert strict.post(speculation, {"fan_out": 2}, **boss).json()["error"]["param"] == "fan_out"  # no ssd configured
    strict.post(speculation, {"lookahead": 3}, **boss)

    def changes() -> list[tuple[bool, int]]:
        entries = [json.loads(text) for text in strict.errors if "speculation was changed" in text]
        return [(entry["enabled"], entry["lookahead"]) for entry in entries]

    eventually(lambda: changes() == [(False, 0), (True, 1), (True, 3)], "the log has what was done")
    assert drafted({**body, "speculation": False}) == 0


def test_rate_limit_over_http(parrot: Path) -> None:
    with LiveServer("--model", str(parrot), "--rate-limit", "2") as live:
        live.wait_until_ready()
        found = [live.post(COMPLETIONS, HI) for _ in range(3)]
        assert [answer.status_code for answer in found] == [200, 200, 429]
        assert found[2].json()["error"]["type"] == "rate_limit_error"
        assert live.get("/health").status_code == 200  # probes are not counted


LONG = "a" * 5000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-queu = 3", "max-queu"),
        ("max-queue = true", "max-queue"),
        ("access-log = 1", "access-log"),
        ("[limits]\nmax-queue = 3", "limits"),
        ("max-queue = ", "is not valid TOML"),
        ("max-queue = 1\nmax_queue = 2", "'max-queue' and 'max_queue' are one setting"),
        ("model = {a = 2026-11-30, b = [true]}", r"model is {a = 2026-11-30, b = \[true\]}, and"),
        ('model = "a\\nb"', r"no model 'a\\nb': .*/a\\nb"),
        ('host = "a\\nb"\nmodel = "smollm2-135m"', r"cannot listen on a\\nb:"),
        (f'max-queue = "{LONG}"', r"max-queue: invalid int value: 'a+\.\.\.a+'"),
        (f'model = "{LONG}"', r"cannot look at 'a+\.\.\.a+': File name too long"),
        (f"{LONG} = 1", r"'a+\.\.\.a+' is no setting"),
        ('model = "~nobody-of-this-name/m"', "cannot look at"),
        ('model = ["a", "b"]', r"model is \['a', 'b'\], and should be a number or a string"),
        ("fan-out = [3, 2]", r"fan-out is \[3, 2\]"),
        ("access-log = [true]", r"access-log is \[true\], and should be true or false"),
        ('api-key = ["k", ["l"]]', "api-key is .*, and should be a string or a list of strings"),
        ("model = 2026-11-30", "model is 2026-11-30, and"),
        ("model = 2026-11-30T01:02:03", "model is 2026-11-30T01:02:03, and"),
        ("model = 01:02:03", "model is 01:02:03, and"),
        ('engine-seed = "a"', "engine-seed: invalid int value: 'a'"),
        ("max_queue = 1.5", "max_queue: invalid int value: '1.5'"),
        ('max-body-mb = "x"', "max-body-mb: 'x' is no number of megabytes"),
        ('dtype = "int3"', "dtype: invalid choice: 'int3'"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that says where to look, and of a setting what was made of it: never the usage of the flags."""
    file = tmp_path / "server.toml"
    file.write_text(text)
    assert main(["--config", str(file)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert len(said) < 1500
    assert re.search(words, said)


def test_a_file_of_an_editor_that_marks_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("max-queue = 7", "utf-8-sig")
    assert server_config(parse_arguments(["--config", str(file)])).max_queue == 7


def test_flags_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("port = 1\nmax_queue = 7\nlookahead = 2\nno-page = true")
    args = parse_arguments(["--config", str(file), "--port", "2"], add_engine_arguments)
    config = server_config(args)
    assert (config.port, config.max_queue, config.has_page, args.lookahead) == (2, 7, False, 2)


def test_the_address_of_the_admin_endpoint_is_told_from_the_servers(
    parrot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--model", str(parrot), "--port", "0", "--admin-port", port, "--admin-key", "boss"]
        assert main(flags) == 1
    assert f"port {port} on 127.0.0.1 is taken by another program (choose another with --admin-port" in (
        capsys.readouterr().err
    )


def test_who_interrupts_a_start_reads_no_trace(
    parrot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(running: Coroutine[Any, Any, None]) -> None:
        running.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("ssd_ascend.serve.__main__.asyncio.run", interrupted)
    assert main(["--model", str(parrot)]) == 130
    assert capsys.readouterr().err == ""


def test_what_a_client_writes_is_told_in_a_log_without_what_moves_a_cursor() -> None:
    assert str(fields(path="/\x1b[31m", plain="/v1/\u6a21", empty="")) == "path='/\\x1b[31m' plain=/v1/\u6a21 empty=''"


def test_an_admin_endpoint_without_a_port_is_none() -> None:
    for flags in (["--admin-key", "k"], ["--admin-host", "::1"]):
        with pytest.raises(ConfigError, match="has no port"):
            server_config(parse_arguments(flags))
    with pytest.raises(ConfigError, match="cannot all have it"):
        plan_for(parse_arguments(["--admin-port", "0"]))
    whole = ["--topology", "laptop-cpu", "--preset", "smollm2-135m", "--admin-key", "k"]
    with pytest.raises(ConfigError, match="has no port"):
        launch(parse_arguments(whole, add_engine_arguments), flags_for(whole), print, list)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--worker", "process"], "--worker given, but sd drafts in this process"),
        (["--speculator", "none", "--draft", "d"], "no speculator uses it"),
        (["--max-body-mb", "0"], "max_body_bytes is 0"),
        (["--kv-cache-gb", "1", "--num-kv-blocks", "9"], "both say how large"),
    ],
)
def test_what_every_server_of_a_plan_would_refuse_is_refused_by_the_launcher(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be started again and again."""
    assert main(["--topology", "laptop-cpu", "--preset", "smollm2-135m-eagle3", *flags]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


def test_a_port_that_cannot_be_had_ends_the_launcher_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "for this test alone")
    flags = ["--topology", "laptop-cpu", "--preset", "smollm2-135m"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([*flags, "--port", str(taken.getsockname()[1])]) == 1
    assert "is taken by another program" in capsys.readouterr().err
    assert main([*flags, "--port", "99999"]) == 1
    assert "cannot listen on 127.0.0.1:99999" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["", " ", "mine"])
def test_a_launcher_makes_a_secret_unless_there_is_one(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one would keep every process of the plan from starting."""
    monkeypatch.setenv(SECRET, given)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--topology", "laptop-cpu", "--preset", "smollm2-135m", "--port", port]) == 1
    made = env.speculator_secret() or ""
    assert made == "mine" if given == "mine" else len(made) == 64


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    """Its servers are started with the same file, which may hold keys; what of it is the launcher's is not theirs."""
    file = tmp_path / "server.toml"
    file.write_text(
        'topology = "laptop-cpu"\npreset = "smollm2-135m-eagle3"\nreplicas = 2\nray-serve = false\n'
        'host = "::"\napi-key = "k"\ndtype = "float32"\ntp = 1\nno-graphs = true'
    )
    argv = ["--config", str(file), "--max-num-seqs", "3"]
    args = parse_arguments(argv, add_engine_arguments)
    plan, topology = plan_for(args)
    assert len(plan.replicas) == 2
    flags = flags_for(argv, flags_of_file(argv, add_engine_arguments))
    assert flags.speculator == ("--dtype=float32", "--no-graphs", "--max-num-seqs", "3")
    role = roles_of(plan, topology, flags)[-1]
    own = parse_arguments(role.command("127.0.0.1", 9)[1:], add_engine_arguments)
    assert not hasattr(own, "topology")
    assert engine_config(own).speculation.speculator == plan.mode
    config = server_config(own)
    assert (config.host, config.port, config.api_keys, own.dtype) == ("127.0.0.1", 9, ("k",), "float32")


def test_a_servers_seed_repeats_its_answers_in_their_order(parrot: Path) -> None:
    """The parrot says which seed a request came with."""

    def seeds() -> list[str]:
        with LiveServer("--model", str(parrot), "--engine-seed", "7") as live:
            live.wait_until_ready()
            body = {"prompt": "SEED", "max_tokens": 30, "n": 2}
            found = [live.post("/v1/completions", body).json()["choices"] for _ in range(2)]
            return [choice["text"] for choices in found for choice in choices]

    first = seeds()
    assert first == seeds()
    assert len(set(first)) == 4


def test_every_replica_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or equal requests to two of them would get equal answers."""
    argv = ["--topology", "laptop-cpu", "--preset", "smollm2-135m", "--replicas", "2", "--engine-seed", "7"]
    targets: list[Role] = []

    async def noted(args: object, serving: object, roles: list[Role], *rest: object) -> None:
        targets.extend(role for role in roles if role.kind == "target")

    monkeypatch.setenv(SECRET, "for this test alone")
    monkeypatch.setattr("ssd_ascend.serve.launch._serve", noted)
    args = parse_arguments(argv, add_engine_arguments)
    launch(args, flags_for(argv), print, list)
    words = [role.command("127.0.0.1", 9)[1:] for role in targets]
    first, second = (engine_config(parse_arguments(flags, add_engine_arguments)).seed for flags in words)
    assert first == 7
    assert second not in (None, 7)


def test_a_plan_is_not_made_beyond_the_models_positions() -> None:
    flags = ["--topology", "laptop-cpu", "--preset", "smollm2-135m", "--context", "20000"]
    with pytest.raises(ConfigError, match="20000 tokens is more than its 8192 positions"):
        plan_for(parse_arguments(flags))


def test_a_flag_is_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    """What the launcher takes for its own, and what it passes on, is told by whole names."""
    with pytest.raises(SystemExit):
        parse_arguments(["--topo", "laptop-cpu"], add_engine_arguments)
    assert "unrecognized arguments: --topo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--read-timeout", "nan"], "read_timeout_s is nan"),
        (["--request-timeout", "inf"], "request_timeout_s is inf"),
        (["--drain-timeout", "-1"], "drain_s is -1"),
        (["--drain-timeout", "nan"], "drain_s is nan"),
        (["--api-key", ""], "a key is empty"),
        (["--admin-port", "0", "--admin-key", " "], "a key is empty"),
    ],
)
def test_limits_that_are_none_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        server_config(parse_arguments(flags))


@pytest.mark.parametrize("text", ["", " \t"])
@pytest.mark.parametrize(("name", "flag"), [("SSD_API_KEY", "--api-key"), ("SSD_ADMIN_KEY", "--admin-key")])
def test_a_key_of_the_environment_that_is_empty_is_refused(
    name: str, flag: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set, so somebody means to be asked for it; to serve open would be the opposite. A flag beats it."""
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is empty: it would keep nobody out"):
        server_config(parse_arguments([]))
    config = server_config(parse_arguments([flag, "k", *(["--admin-port", "0"] if flag == "--admin-key" else [])]))
    assert "k" in (*config.api_keys, config.admin_key)


@pytest.mark.parametrize("text", ["inf", "nan", "x"])
def test_what_is_no_size_of_a_body(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--max-body-mb", text])
    assert f"'{text}' is no number of megabytes" in capsys.readouterr().err


def test_an_address_is_a_url_in_both_families() -> None:
    assert (url_of("127.0.0.1", 8), url_of("::1", 8)) == ("http://127.0.0.1:8", "http://[::1]:8")


def test_defaults_have_one_home() -> None:
    assert server_config(parse_arguments([])) == ServerConfig()


def test_the_admin_endpoint_needs_a_key_of_its_own() -> None:
    with pytest.raises(ConfigError, match="SSD_ADMIN_KEY"):
        server_config(parse_arguments(["--admin-port", "0"]))
    with pytest.raises(ConfigError, match="also an API key"):
        server_config(parse_arguments(["--admin-port", "0", "--admin-key", "k", "--api-key", "k"]))


def test_a_full_disk_under_the_log_stops_nobody(parrot: Path) -> None:
    """Standard error is /dev/full, where every write fails."""
    command = [sys.executable, "-m", "tests.serve.fake_server", "--port", "0", "--model", str(parrot), "--access-log"]
    with Path("/dev/full").open("w") as full, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=full, text=True, cwd=ROOT
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("ready")).split(" on ")[1].split(" ")[0]
        for _ in range(20):
            answer = httpx.post(url + COMPLETIONS, json=HI, timeout=PATIENCE_S)
            assert answer.json()["choices"][0]["text"] == "hihi"
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
