"""A server's life: starting, ready, degraded, failing, draining. Each test has a server of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ssd_ascend.serve.restarts import Restarts
from tests.serve.conftest import parrot_directory
from tests.serve.live import PATIENCE_S, LiveServer, eventually
from tests.unit.text_toys import byte_level_backend, write_directory

SLOW: dict[str, Any] = {"prompt": "SLOW and steady ", "max_tokens": 200}
HI: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}


def one_sentence(live: LiveServer, *words: str) -> None:
    """The server ended with a status other than 0 and said why, in one line without a stack trace."""
    assert live.wait() == 1
    (line,) = live.errors
    assert line.startswith("ssd_ascend.serve: ")
    for word in words:
        assert word in line


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_starting_then_ready(tmp_path: Path) -> None:
    model = parrot_directory(tmp_path / "slow")
    with LiveServer("--model", str(model)) as live:
        live.wait_until_listening()
        health = live.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        refused = live.post("/v1/completions", {"prompt": "hi"})
        assert refused.status_code == 503
        assert "starting" in refused.json()["error"]["message"]
        assert live.get("/v1/models").status_code == 503
        live.wait_until_ready()
        assert live.get("/health").json()["status"] == "ready"
        assert live.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200
        assert live.stop() == 0


def test_degraded_is_still_200(parrot: Path) -> None:
    with LiveServer("--model", str(parrot)) as live:
        live.wait_until_ready()
        live.post("/v1/completions", {"prompt": "LOST", "max_tokens": 2})
        eventually(lambda: live.get("/health").json()["status"] == "degraded", "the loss shows")
        health = live.get("/health")
        assert health.status_code == 200
        assert "worker is lost" in health.json()["reason"]
        assert live.metric("ssd_speculator_up") == 0


def test_sigterm_drains_and_exits_0(parrot: Path) -> None:
    with LiveServer("--model", str(parrot)) as live:
        live.wait_until_ready()
        stream = live.events("/v1/completions", SLOW)
        first = next(stream)
        live.process.send_signal(signal.SIGTERM)
        events = [first, *stream]
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert live.wait() == 0
        assert live.errors == []


def test_a_drain_has_an_end(parrot: Path) -> None:
    with LiveServer("--model", str(parrot), "--drain-timeout", "0.2") as live:
        live.wait_until_ready()
        stream = live.events("/v1/completions", {**SLOW, "max_tokens": 490})
        next(stream)
        live.process.send_signal(signal.SIGTERM)
        assert "shutting down" in list(stream)[-1]["error"]["message"]
        assert live.wait() == 0


def test_a_second_signal_does_not_wait(parrot: Path) -> None:
    with LiveServer("--model", str(parrot)) as live:
        live.wait_until_ready()
        stream = live.events("/v1/completions", {**SLOW, "max_tokens": 490})
        next(stream)
        live.process.send_signal(signal.SIGINT)
        live.process.send_signal(signal.SIGTERM)  # two of one kind might be merged
        assert "shutting down" in list(stream)[-1]["error"]["message"]
        assert live.wait() == 0


@pytest.mark.parametrize("how", ["KILL", "CRASH"])
def test_engine_death_without_another(parrot: Path, how: str) -> None:
    """B40: every open stream gets an error at once, /health turns 503, the process tree ends."""
    with LiveServer("--model", str(parrot), "--max-restarts", "0") as live:
        live.wait_until_ready()
        engine = live.engine_pid()
        ends: list[Any] = []

        def read() -> None:
            ends.append(list(live.events("/v1/completions", {**SLOW, "max_tokens": 490}))[-1])

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        eventually(lambda: live.metric("ssd_requests_running") == 3, "three run")
        culprit = live.post("/v1/completions", {"prompt": f"{how} now", "max_tokens": 200})
        assert culprit.status_code == 500
        health = live.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert ("SIGKILL" if how == "KILL" else "ZeroDivisionError") in health.json()["reason"]
        assert live.post("/v1/completions", {"prompt": "hi"}).status_code == 503
        for reader in readers:
            reader.join(PATIENCE_S)
        assert [end["error"]["type"] for end in ends] == ["server_error"] * 3
        assert live.wait() == 1
        assert is_gone(engine)


def test_a_dead_engine_is_replaced_and_what_had_not_begun_is_not_lost(parrot: Path) -> None:
    """Four run, two wait, the engine is killed: the four get an error at once, the two an answer from the next."""
    with LiveServer("--model", str(parrot)) as live:
        live.wait_until_ready()
        engine = live.engine_pid()
        ends: dict[str, Any] = {}

        def read(name: str, body: dict[str, Any]) -> None:
            ends[name] = list(live.events("/v1/completions", body))

        running = [threading.Thread(target=read, args=(f"run {i}", {**SLOW, "max_tokens": 1900})) for i in range(4)]
        for thread in running:
            thread.start()
        eventually(lambda: live.metric("ssd_requests_running") == 4, "four run")
        waiting = [threading.Thread(target=read, args=(f"wait {i}", {"prompt": "hi", "max_tokens": 4})) for i in (0, 1)]
        for thread in waiting:
            thread.start()
        eventually(lambda: live.metric("ssd_requests_waiting") == 2, "two wait")
        os.kill(engine, signal.SIGKILL)
        for thread in running + waiting:
            thread.join(PATIENCE_S)
        live.wait_for_line("ready: ")
        assert live.engine_pid() != engine
        assert all(ends[f"run {i}"][-1]["error"]["type"] == "server_error" for i in range(4))
        for i in (0, 1):
            assert ends[f"wait {i}"][-1] == "[DONE]"
            assert "".join(e["choices"][0]["text"] for e in ends[f"wait {i}"][:-1]) == "hihi"
        assert live.get("/health").status_code == 200
        assert live.post("/v1/completions", {"prompt": "hi", "max_tokens": 4}).json()["choices"][0]["text"] == "hihi"
        assert live.stop() == 0


def test_between_two_engines_there_is_503(tmp_path: Path) -> None:
    with LiveServer("--model", str(parrot_directory(tmp_path / "slow"))) as live:
        live.wait_until_ready()
        os.kill(live.engine_pid(), signal.SIGKILL)
        eventually(lambda: live.get("/health").status_code == 503, "it is noticed")
        refused = live.post("/v1/completions", {"prompt": "hi"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "SIGKILL" in live.get("/health").json()["reason"]
        live.wait_for_line("ready: ")
        assert live.get("/health").json()["status"] == "ready"


def test_engines_that_keep_dying_end_the_server(parrot: Path) -> None:
    with LiveServer("--model", str(parrot), "--max-restarts", "1") as live:
        for _ in range(2):
            live.wait_until_ready()
            os.kill(live.engine_pid(), signal.SIGKILL)
        assert live.wait() == 1


class Crowd:
    """Four streams that run, and a request that waits for one of them to end."""

    def __init__(self, live: LiveServer) -> None:
        self.running = [live.events("/v1/completions", {**SLOW, "max_tokens": 1900}) for _ in range(4)]
        for stream in self.running:
            next(stream)
        answers: list[httpx.Response] = []
        self._answers = answers
        self._ask = threading.Thread(target=lambda: answers.append(live.post("/v1/completions", HI)))
        self._ask.start()
        eventually(lambda: live.metric("ssd_requests_waiting") == 1, "one waits")

    def answer(self) -> httpx.Response:
        """To the request that waited."""
        self._ask.join(PATIENCE_S)
        return self._answers[0]


def test_an_engine_that_does_not_start_again_is_tried_again(tmp_path: Path) -> None:
    """Each try counts, and what had not begun waits for the one that comes off."""
    model = parrot_directory(tmp_path / "nest")
    with LiveServer("--model", str(model)) as live:
        live.wait_until_ready()
        crowd = Crowd(live)
        (model / "stillborn").write_text("2")
        os.kill(live.engine_pid(), signal.SIGKILL)
        assert all("SIGKILL" in list(stream)[-1]["error"]["message"] for stream in crowd.running)
        eventually(lambda: "the egg was empty" in (live.get("/health").json().get("reason") or ""), "the reason is new")
        live.wait_for_line("ready: ")
        assert crowd.answer().json()["choices"][0]["text"] == "hihi"
        assert live.metric('ssd_engine_losses_total{how="death"}') == 1
        assert live.metric('ssd_engine_losses_total{how="start"}') == 2
        assert live.stop() == 0
        assert sum("the engine did not start again" in line for line in live.errors) == 2


def test_engines_that_never_start_again_end_the_server(tmp_path: Path) -> None:
    model = parrot_directory(tmp_path / "nest")
    with LiveServer("--model", str(model), "--max-restarts", "2") as live:
        live.wait_until_ready()
        (model / "stillborn").write_text("9")
        os.kill(live.engine_pid(), signal.SIGKILL)
        assert live.wait() == 1
        assert (model / "stillborn").read_text() == "7"
        assert live.errors[-1] == (
            "ssd_ascend.serve: the egg was empty, 7 more are (lost engines: 3, with --max-restarts 2)\n"
        )


def test_old_losses_are_forgotten_but_not_by_engines_that_never_were_ready() -> None:
    now = 0.0
    restarts = Restarts(2, lambda: now)
    for _ in range(9):
        now += 400.0  # never more than two within ten minutes
        assert restarts.may_follow(was_ready=True)
    now += 400.0
    assert restarts.may_follow(was_ready=True)
    now += 400.0
    assert not restarts.may_follow(was_ready=False)
    assert str(restarts) == "lost engines: 3, with --max-restarts 2"
    now += 400.0
    assert restarts.may_follow(was_ready=True)


def test_who_stops_a_server_without_an_engine_need_not_wait(tmp_path: Path) -> None:
    """What had not begun waits for an engine that will not be started any more."""
    model = parrot_directory(tmp_path / "nest")
    with LiveServer("--model", str(model), "--max-restarts", "99", "--drain-timeout", "600") as live:
        live.wait_until_ready()
        crowd = Crowd(live)
        (model / "stillborn").write_text("99")
        os.kill(live.engine_pid(), signal.SIGKILL)
        eventually(lambda: live.get("/health").json()["status"] == "failed", "it is noticed")
        assert live.stop() == 0
        assert crowd.answer().status_code == 500


def test_an_engine_that_is_stuck_is_replaced(parrot: Path) -> None:
    """It neither dies nor says anything, as where a device never ends a step; a process that is stopped is the same."""
    with LiveServer("--model", str(parrot), "--step-timeout", "3") as live:
        live.wait_until_ready()
        stream = live.events("/v1/completions", {**SLOW, "max_tokens": 1900})
        next(stream)
        engine = live.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        eventually(lambda: live.get("/health").json().get("reason", "").startswith("no step"), "it shows before")
        assert "stuck" in list(stream)[-1]["error"]["message"]
        live.wait_for_line("ready: ")
        assert is_gone(engine)
        assert live.post("/v1/completions", HI).json()["choices"][0]["text"] == "hihi"
        assert live.metric('ssd_engine_losses_total{how="stuck"}') == 1
        # one that is stopped while nobody asks is found by who asks next, and answered by the engine after it
        os.kill(live.engine_pid(), signal.SIGSTOP)
        assert live.post("/v1/completions", HI).json()["choices"][0]["text"] == "hihi"
        assert live.metric('ssd_engine_losses_total{how="stuck"}') == 2
        assert live.stop() == 0
        assert sum("the engine was stuck: it had work, and ended no step for 3 s" in line for line in live.errors) == 2


@pytest.mark.parametrize("how", ["HANG", "FAULT"])
def test_the_log_says_where_an_engine_was(parrot: Path, how: str) -> None:
    """That was stuck, or crashed; its own loop could not say so."""
    with LiveServer("--model", str(parrot), "--step-timeout", "2", "--log-format", "json") as live:
        live.wait_until_ready()
        assert live.post("/v1/completions", {"prompt": f"{how} now", "max_tokens": 200}).status_code == 500
        live.wait_for_line("ready: ")
        assert live.stop() == 0
        told = [json.loads(line)["message"] for line in live.errors]
        (where,) = [message for message in told if message.startswith("where the engine was:")]
        assert "_misbehave" in where
        assert ("SIGSEGV" if how == "FAULT" else "stuck") in told[0]


def test_a_server_that_was_stopped_itself_does_not_blame_its_engine(parrot: Path) -> None:
    with LiveServer("--model", str(parrot), "--step-timeout", "2") as live:
        live.wait_until_ready()
        stream = live.events("/v1/completions", {**SLOW, "max_tokens": 400})
        next(stream)
        processes = (live.process.pid, live.engine_pid())  # as Ctrl-Z and fg in a terminal do
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        assert list(stream)[-1] == "[DONE]"
        assert live.stop() == 0


def test_the_engine_dies_with_its_front_end(parrot: Path) -> None:
    with LiveServer("--model", str(parrot)) as live:
        live.wait_until_ready()
        engine = live.engine_pid()
        os.kill(live.process.pid, signal.SIGKILL)
        live.wait()
        eventually(lambda: is_gone(engine), "the engine is gone")


def test_port_taken(parrot: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with LiveServer("--model", str(parrot), port=port) as live:
            one_sentence(live, port, "taken", "--port")


def test_engine_that_cannot_be_built(tmp_path: Path) -> None:
    with LiveServer("--model", str(parrot_directory(tmp_path / "broken"))) as live:
        one_sentence(live, "the parrot is dead", "get another parrot")
        assert live.lines == []  # nothing was loading


@pytest.mark.parametrize("model", ["/nowhere/at/all", ""])
def test_no_such_model(tmp_path: Path, model: str) -> None:
    with LiveServer("--model", model or str(tmp_path)) as live:
        one_sentence(live, model or str(tmp_path))


def test_api_key_and_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "plain", byte_level_backend(), eos_token="</s>")
    with LiveServer("--model", str(model), "--api-key", "sesame") as live:
        live.wait_until_ready()
        body = {"prompt": "hi", "max_tokens": 2}
        key = {"Authorization": "Bearer sesame"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}):
            refused = live.post("/v1/completions", body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert live.post("/v1/completions", body, headers=key).status_code == 200
        assert live.get("/v1/models").status_code == 401
        assert live.get("/health").status_code == 200
        assert live.get("/metrics").status_code == 200
        chat = live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, headers=key)
        assert chat.status_code == 400
        assert chat.json()["error"]["param"] == "messages"
        assert "--chat-template" in chat.json()["error"]["message"]
