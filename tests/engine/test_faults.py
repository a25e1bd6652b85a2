"""Whatever happens to the draft worker costs speed only: killed, hung, late, mad, or out of memory."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.engine import Engine
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.supervisor import WorkerSupervisor
from ssd_ascend.speculation.worker_link import InProcessLink
from ssd_ascend.transport.messages import Answer, Foreseen, Message, Shutdown
from ssd_ascend.transport.socket import SocketTransport
from tests.engine.harness import Run, drive, greedy, make_engine, prompts_of, run, speculation
from tests.engine.lines import Edited, Late, link_of, through

LONG_S = 120.0
SIXTEEN = prompts_of([3, 17, 9, 31, 16, 5, 40, 22, 8, 12, 33, 7, 15, 26, 4, 19])
SOME = SIXTEEN[:5]


class Streams:
    """Requests under way, stepped by hand."""

    def __init__(self, engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> None:
        self.engine = engine
        self.tokens: list[list[int]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            engine.submit(EngineRequest(id=i, prompt_token_ids=prompt, sampling=sampling))

    def step(self, steps: int = 1) -> int:
        """Some steps; returns how many tokens came."""
        before = sum(map(len, self.tokens))
        for _ in range(steps):
            for delta in self.engine.step():
                self.tokens[delta.seq_id] += delta.token_ids
        return sum(map(len, self.tokens)) - before

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Step, slowly enough for streams to last, until something happened."""
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert self.engine.has_work, "the streams ended before it happened"
            assert time.monotonic() < deadline, "it never happened"
            self.step()
            time.sleep(0.05)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    @property
    def stats(self) -> Any:
        return self.engine.stats().speculation


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines to close."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()


def supervisor_of(engine: Engine) -> WorkerSupervisor:
    link: Any = engine._speculator._worker._link  # type: ignore[attr-defined]
    assert isinstance(link, WorkerSupervisor)
    return link


def test_sixteen_streams_outlive_a_worker_that_is_killed_and_one_that_hangs(pair: Path, engines: list[Engine]) -> None:
    """They end with the tokens of a run without speculation; each time another worker takes the streams up."""
    sampling, room = greedy(340), {"max_num_seqs": 16, "num_kv_blocks": 512}
    plain = run(pair, SIXTEEN, sampling, **room)
    config = speculation(pair, "ssd", worker="process", draft_threads=1, worker_timeout_s=3.0)
    engines.append(make_engine(pair, config, **room))
    streams = Streams(engines[0], SIXTEEN, sampling)
    supervisor = supervisor_of(engines[0])

    def goes_on_without_a_worker_until_the_next_is_there(restarts: int) -> None:
        streams.step_until(lambda: not streams.stats.worker_alive)
        health = engines[0].health()
        assert health is not None
        assert "no speculation" in health
        assert streams.step(3) == 3 * 16, "plain decoding: one token a stream and step"
        assert supervisor.wait_ready(LONG_S)
        hits = streams.stats.hits
        streams.step_until(lambda: streams.stats.hits > hits + 5)
        assert engines[0].health() is None
        assert (streams.stats.worker_alive, streams.stats.worker_restarts) == (True, restarts)

    streams.step(10)
    assert engines[0].health() is None
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    goes_on_without_a_worker_until_the_next_is_there(1)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    goes_on_without_a_worker_until_the_next_is_there(2)
    assert "no answer for" in (supervisor.reason or "")
    streams.finish()
    assert streams.tokens == plain.tokens


# -- nonsense ---------------------------------------------------------------------------------


def changed(**fields: Any) -> Callable[[Message], Message]:
    """Answers with these fields in place of their own; a function makes the value from the old one."""

    def edit(message: Message) -> Message:
        if not isinstance(message, Answer):
            return message
        values = {name: value(getattr(message, name)) if callable(value) else value for name, value in fields.items()}
        return replace(message, **values)

    return edit


def foreseen(**fields: Any) -> Callable[[Message], Message]:
    """Likewise, of what is told ahead."""

    def edit(message: Message) -> Message:
        if not isinstance(message, Foreseen):
            return message
        made = {name: value(getattr(message, name)) if callable(value) else value for name, value in fields.items()}
        return replace(message, **made)

    return edit


NONSENSE: dict[str, Callable[[Message], Message]] = {
    "wrong sequences": changed(seq_ids=lambda ids: [seq_id + 1000 for seq_id in ids]),
    "one sequence twice": changed(seq_ids=lambda ids: [ids[0]] * len(ids)),
    "wrong number": changed(number=lambda number: number + 5),
    "an old number": changed(number=0),
    "rows missing": changed(drafts=lambda drafts: drafts[:1]),
    "tokens beyond the vocabulary": changed(drafts=lambda drafts: [[token + 24 for token in row] for row in drafts]),
    "tokens below zero": changed(drafts=lambda drafts: [[token - 24 for token in row] for row in drafts]),
    "more drafts than fit": changed(drafts=lambda drafts: [[3] * 99 for _ in drafts]),
    "lists of unequal length": changed(sources=[]),
    "no answer": lambda message: Shutdown(),
    "guesses for a round to come": foreseen(number=lambda number: number + 5),
    "guesses of another lookahead": foreseen(lookahead=7),
    "guesses beyond the vocabulary": foreseen(entries=lambda entries: [24] * len(entries)),
    "more guesses than counted": foreseen(counts=lambda counts: [0] * len(counts)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_never_a_wrong_token_and_ends_the_worker(
    pair: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After a few good answers, so that speculation was under way."""
    plain = run(pair, SOME, greedy())
    through(monkeypatch, lambda line: Edited(line, NONSENSE[what], first=4))
    engine = make_engine(pair, speculation(pair, "ssd"))
    other = drive(engine, SOME, greedy())
    assert other.tokens == plain.tokens
    assert not other.stats.speculation.worker_alive
    assert "no speculation" in (engine.health() or "")
    engine.close()


def test_drafts_that_are_valid_but_random_cost_acceptance_only(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell a bad guess from a lie, and nobody needs to."""
    plain = run(pair, SOME, greedy())
    generator = torch.Generator().manual_seed(3)
    scramble = changed(
        drafts=lambda drafts: [torch.randint(0, 24, (len(row),), generator=generator).tolist() for row in drafts]
    )
    ahead = foreseen(entries=lambda entries: _scrambled(entries, lookahead=4))
    through(monkeypatch, lambda line: Edited(line, lambda message: ahead(scramble(message))))
    other = run(pair, SOME, greedy(), speculation(pair, "ssd"))
    assert other.tokens == plain.tokens
    assert other.stats.speculation.worker_alive
    assert other.stats.speculation.accepted < 0.2 * other.stats.speculation.drafted


def _scrambled(entries: list[int], *, lookahead: int) -> list[int]:
    """The same outcomes, other drafts."""
    width, chance = 3 + lookahead, random.Random(3)
    return [value if at % width < 3 else chance.randrange(24) for at, value in enumerate(entries)]


@pytest.mark.parametrize("law", ["nan", "inf", "none of it"])
def test_a_law_that_is_no_law_breaks_nobody(pair: Path, monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    """Sampled rows: the drafts count as declined, every answer ends, no token leaves the vocabulary."""
    value = {"nan": float("nan"), "inf": float("inf"), "none of it": float("-inf")}[law]
    spoil = changed(law=lambda law: None if law is None else torch.full_like(law, value))
    through(monkeypatch, lambda line: Edited(line, spoil))
    sampling = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5)
    other = run(pair, SOME, sampling, speculation(pair, "ssd"))
    assert [len(tokens) for tokens in other.tokens] == [24] * 5
    assert {token for tokens in other.tokens for token in tokens} <= set(range(24))
    assert other.stats.speculation.accepted == 0


class Garbled:
    """A real socket, into whose other end the test writes bytes."""

    def __init__(self, line: Any, garbage: bytes, *, after: int) -> None:
        ours, self._theirs = socket.socketpair()
        self._line, self._socket, self._garbage, self._good = line, SocketTransport(ours), garbage, after

    def send(self, message: Message) -> None:
        self._good -= 1
        if self._good < 0:
            self._theirs.sendall(self._garbage)
        else:
            self._line.send(message)

    def recv(self, timeout_s: float | None) -> Message | None:
        return self._line.recv(timeout_s) if self._good >= 0 else self._socket.recv(timeout_s)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._socket.close()
        self._theirs.close()
        self._line.close()


GARBAGE = {
    "zeros": b"\x00" * 64,
    "ones": b"\xff" * 4096,
    "all": bytes(range(256)) * 8,
    "http": b"HTTP/1.1 200 OK\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_garbage_on_the_line(pair: Path, monkeypatch: pytest.MonkeyPatch, garbage: bytes) -> None:
    plain = run(pair, SOME, greedy())
    through(monkeypatch, lambda line: Garbled(line, garbage, after=3))
    other = run(pair, SOME, greedy(), speculation(pair, "ssd"))
    assert other.tokens == plain.tokens
    assert not other.stats.speculation.worker_alive


@pytest.mark.parametrize("method", ["glue", "branch", "chain", "release"])
def test_a_worker_that_fails_in_the_middle_of_a_round(
    pair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Its exception stays with it: said once, with the trace, and the target goes on."""
    plain = run(pair, SOME, greedy())
    own, calls = getattr(PagedDrafter, method), 0

    def fail(self: PagedDrafter, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise IndexError("a bug in the drafter")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(PagedDrafter, method, fail)
    engine = make_engine(pair, speculation(pair, "ssd", on_miss="draft"), graphs=False)  # step by step
    other = drive(engine, SOME, greedy(30))
    assert [tokens[:24] for tokens in other.tokens] == plain.tokens
    assert not other.stats.speculation.worker_alive
    assert "IndexError: a bug in the drafter" in (engine.health() or "")
    lost = [record for record in caplog.records if "draft worker lost" in record.getMessage()]
    assert [bool(record.exc_info) for record in lost] == [True]
    engine.close()


# -- late ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pile_up", [False, True], ids=["answers late", "requests pile up"])
@pytest.mark.parametrize("drafter", ["model", "eagle3", "ngram"])
def test_late_answers_are_dropped_and_no_news_is_lost(
    pair: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, pile_up: bool
) -> None:
    """Tokens do not change, and the worker, told of every step in order, never objects."""
    plain = run(pair, SOME, greedy(60))
    lines: list[Late] = []

    def wrap(line: Any) -> Late:
        lines.append(Late(line, seed=len(lines), most=3, pile_up=pile_up))
        return lines[-1]

    through(monkeypatch, wrap)
    engine = make_engine(pair, speculation(pair, "ssd", drafter))
    other = drive(engine, SOME, greedy(60))
    assert other.tokens == plain.tokens
    assert engine.health() is None
    assert lines[0].late > 5
    stats = other.stats.speculation
    assert stats.worker_alive
    if drafter == "model":
        assert stats.hits > 0
        assert stats.accepted > 0
    engine.close()


# -- what is left behind ---------------------------------------------------------------------------------


def holdings(engine: Engine) -> dict[str, int]:
    """Everything that a draft worker and the target's end of its line keep by sequence."""
    worker = link_of(engine)._draft_worker
    client: Any = engine._speculator._worker  # type: ignore[attr-defined]
    drafter: Any = worker._drafter
    held = {
        "sequences": len(worker._sequences),
        "offered": len(worker._offered),
        "cache": len(worker._cache),
        "cache index": len(worker._cache._of_sequence),
        "cache bytes": worker._cache.num_bytes,
        "fallback": len(worker._fallback._indexes),
        "confidences": len(getattr(worker._fan_out, "_confidence", ())),
        "attached": len(client.attached),
        "offers": len(client._offers),
        "unanswered": len(client._unanswered),
        "released": len(client._released),
        "told ahead": len(client._ahead),
        "open": len(client._open),
    }
    if isinstance(drafter, PagedDrafter):
        held["blocks"] = drafter._blocks.num_used
        held["counts"] = len(drafter._sampler._counts)
    else:
        held["indexes"] = len(drafter._indexes)
    return held


def settle(engine: Engine) -> None:
    """In process a worker works when it is listened to."""
    link = link_of(engine)
    assert isinstance(link, InProcessLink)
    link._pump()


@pytest.mark.parametrize("fan_out", [2, "auto"])
@pytest.mark.parametrize("drafter", ["model", "eagle3", "ngram"])
def test_aborts_and_ends_free_what_the_worker_holds(
    pair: Path, engines: list[Engine], drafter: str, fan_out: Any
) -> None:
    """Streams that are left at any step, some before they began; then nothing of them is anywhere."""
    config = speculation(pair, "ssd", drafter, fan_out=fan_out)
    engine = make_engine(pair, config, max_num_seqs=4)
    engines.append(engine)
    before = holdings(engine)
    for aborted in range(12):
        for i, prompt in enumerate(SOME):
            engine.submit(EngineRequest(id=10 * aborted + i, prompt_token_ids=prompt, sampling=greedy(20)))
        for _ in range(aborted % 6):
            engine.step()
        engine.abort([10 * aborted + i for i in range(3)])
        engine.step()
        engine.abort([10 * aborted + i for i in range(3, 5)])
    engine.step()
    assert not engine.has_work
    settle(engine)
    assert holdings(engine) | {"unanswered": 0} == before
    again = drive(engine, SOME, greedy())
    assert again.tokens == run(pair, SOME, greedy()).tokens
    settle(engine)
    assert holdings(engine) | {"unanswered": 0} == before


def test_preempted_sequences_leave_nothing(pair: Path, engines: list[Engine]) -> None:
    """Preempted ones are attached anew when they return."""
    prompts = prompts_of([40, 30, 20, 45, 16, 33])
    engine = make_engine(pair, speculation(pair, "ssd"), num_kv_blocks=11)
    engines.append(engine)
    before = holdings(engine)
    result: Run = drive(engine, prompts, greedy(60))
    assert result.stats.preemptions > 0
    settle(engine)
    assert holdings(engine) | {"unanswered": 0} == before


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_grows_over_many_rounds(pair: Path, engines: list[Engine], rounds: int) -> None:
    """Requests come and go, some sampled, some with penalties, some left alone by their clients."""
    engine = make_engine(pair, speculation(pair, "ssd", fan_out="auto"), max_num_seqs=4)
    engines.append(engine)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5},
    ]
    before, next_id, peak, early, open_ids = holdings(engine), 0, 0, 0.0, []
    for step in range(rounds):
        while len(open_ids) < 4:
            sampling = SamplingParams(max_tokens=20 + next_id % 17, ignore_eos=True, **kinds[next_id % 3])
            prompt = SIXTEEN[next_id % 16]
            engine.submit(EngineRequest(id=next_id, prompt_token_ids=prompt, sampling=sampling))
            open_ids.append(next_id)
            next_id += 1
        if step % 50 == 49:
            engine.abort([open_ids[0]])
        for delta in engine.step():
            if delta.finish_reason is not None:
                open_ids.remove(delta.seq_id)
        held = holdings(engine)
        assert held["sequences"] <= 4 + 4
        assert held["cache"] <= 8 * 15
        peak = max(peak, held["cache bytes"])
        if step == rounds // 5:
            early = resident_mb()
    assert 0 < peak < 8 * 15 * (4 * 24 * 4 + 8 * 8)
    if rounds >= 10_000:
        assert resident_mb() < early + 30.0
    engine.abort(open_ids)
    engine.step()
    settle(engine)
    assert holdings(engine) | {"unanswered": 0} == before


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
