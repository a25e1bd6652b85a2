"""Several ranks say what one says, token for token, with every way to speculate; and a lost rank is an error, no hang.

The ranks are processes, over gloo. Each engine takes seconds to gather them, so one serves many prompts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest
from ssd_ascend.distributed.collectives import GroupCollectives
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.gather import from_plain, to_plain
from ssd_ascend.engine.run_ahead import RunAhead
from ssd_ascend.errors import ConfigError, WorkerError
from tests.engine.capturing import capture_everywhere
from tests.engine.harness import (
    DTYPE,
    drive,
    dtype_across_ranks,
    greedy,
    make_engine,
    needs_devices,
    prompts_of,
    run,
    speculation,
)

PROMPTS = prompts_of([1, 5, 17, 33, 16])
SOON_S = 120.0
"""What the slowest machine takes for what takes seconds; the libraries themselves would wait for minutes more."""


def rank_pids(engine: Engine) -> list[int]:
    """The processes of ranks 1, 2, ..., when the engine is in this process."""
    return children_of(os.getpid())


def children_of(parent: int) -> list[int]:
    """The ranks that a process started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z" and b"import_module" in line:
                found.append(int(entry.name))
    return sorted(found)


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def kill_a_rank(engine: Engine) -> None:
    """Its only other one, which is missed within seconds, and named."""
    (pid,) = rank_pids(engine)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
        steps(engine, 400)
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    ("family", "size"), [("qwen3", 4), *(pytest.param("llama", size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_tokens_are_those_of_one_rank(pairs: dict[str, Path], family: str, size: int) -> None:
    """4 ranks share 2 key-value heads. Prompts in chunks, mixed with decoding rows."""
    needs_devices(size)
    options: dict[str, Any] = {"dtype": dtype_across_ranks(), "max_batched_tokens": 40, "max_num_seqs": 4}
    alone = run(pairs[family], PROMPTS, greedy(8), **options)
    engine = make_engine(pairs[family], tensor_parallel=size, **options)
    try:
        assert len(rank_pids(engine)) == size - 1
        assert drive(engine, PROMPTS, greedy(8)).tokens == alone.tokens
    finally:
        engine.close()
    assert rank_pids(engine) == []


@pytest.mark.parametrize(
    ("speculator", "options"),
    [
        ("sd", {"drafter": "eagle3", "draft_rope": "auto"}),
        ("ssd", {"drafter": "model", "worker": "process"}),
        pytest.param("ssd", {"drafter": "eagle3"}, marks=pytest.mark.slow),
    ],
    ids=["sd-eagle3", "ssd-model-process", "ssd-eagle3"],
)
def test_speculation_over_two_ranks(pair: Path, speculator: str, options: dict[str, Any]) -> None:
    """Features are whole on rank 0, drafts reach every rank, acceptance is that of one rank."""
    needs_devices(2)
    config = speculation(pair, speculator, **options)
    dtype = dtype_across_ranks()
    shared = run(pair, PROMPTS, greedy(16), config, tensor_parallel=2, dtype=dtype)
    assert shared.tokens == run(pair, PROMPTS, greedy(16), dtype=dtype).tokens
    assert shared.stats.speculation.drafted > 0
    if speculator == "sd":  # what the other drafts depends on time
        alone = run(pair, PROMPTS, greedy(16), config, dtype=dtype)
        assert shared.stats.speculation.accepted == alone.stats.speculation.accepted


@pytest.mark.skipif(DTYPE == "float32", reason="compared with one rank, in this dtype, above")
def test_speculation_is_exact_among_as_many_ranks(pair: Path) -> None:
    """In the dtype that is served: sums over the same ranks round alike, whatever the batch."""
    needs_devices(2)
    plain = run(pair, PROMPTS, greedy(16), tensor_parallel=2)
    assert run(pair, PROMPTS, greedy(16), speculation(pair, "sd"), tensor_parallel=2).tokens == plain.tokens


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_for_rank_0(pair: Path, sent: signal.Signals) -> None:
    needs_devices(2)
    engine = make_engine(pair, tensor_parallel=2)
    try:
        engine.submit(EngineRequest(id=0, prompt_token_ids=[3, 4, 5], sampling=greedy(20)))
        engine.step()
        for pid in rank_pids(engine):
            os.kill(pid, sent)
        time.sleep(0.1)
        while engine.has_work:
            engine.step()
    finally:
        engine.close()


def test_a_killed_rank_is_named_and_nothing_hangs(pair: Path) -> None:
    needs_devices(2)
    engine = make_engine(pair, tensor_parallel=2)
    try:
        engine.submit(EngineRequest(id=0, prompt_token_ids=[3, 4, 5], sampling=greedy(400)))
        engine.step()
        kill_a_rank(engine)
        assert "rank 1" in str(engine.health())
    finally:
        engine.close()
    assert rank_pids(engine) == []


def test_a_rank_that_stops_holds_nobody_up(pair: Path) -> None:
    """It keeps its connections, and rank 0 waits for it inside the library."""
    needs_devices(2)
    engine = make_engine(pair, tensor_parallel=2)
    try:
        engine.submit(EngineRequest(id=0, prompt_token_ids=[3, 4, 5], sampling=greedy(400)))
        engine.step()
        (pid,) = rank_pids(engine)
        os.kill(pid, signal.SIGSTOP)
        ranks = engine._executor.target._ranks
        assert ranks is not None
        ranks.leader._silence_s = 6.0  # from here on: a rank that loads on a busy machine may be silent for longer
        began = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 gave no sign of life for 6 s"):
            steps(engine, 400)
        assert time.monotonic() - began < SOON_S
    finally:
        engine.close()
    assert rank_pids(engine) == []


def test_a_rank_is_killed_under_a_step_that_was_queued(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks have gone ahead of what rank 0 knows. Closing over such a step is no different from any other end."""
    needs_devices(2)
    capture_everywhere(monkeypatch)
    dtype = dtype_across_ranks()
    expected = run(pair, PROMPTS, greedy(30), dtype=dtype).tokens
    engine = make_engine(pair, tensor_parallel=2, dtype=dtype)
    try:
        assert drive(engine, PROMPTS, greedy(30)).tokens == expected
        ahead = engine._executor.ahead
        assert isinstance(ahead, RunAhead)
        engine.submit(EngineRequest(id=9, prompt_token_ids=[3, 4, 5], sampling=greedy(400)))
        steps(engine, 3)
        assert ahead._queued is not None
        kill_a_rank(engine)
    finally:
        engine.close()
    assert rank_pids(engine) == []


def test_a_rank_that_cannot_load_says_why(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the other rank fails: rank 0 gets its sentence, and does not begin a collective that nobody would end."""
    needs_devices(2)

    def never(*_: object) -> NoReturn:
        raise AssertionError("a collective without the other rank")

    for name in ("all_gather", "all_reduce", "broadcast"):
        monkeypatch.setattr(GroupCollectives, name, never)
    from ssd_ascend.engine import gather

    def spoiled(config: EngineConfig) -> dict[str, Any]:
        return {**to_plain(config), "max_model_len": 4096}

    monkeypatch.setattr(gather, "to_plain", spoiled)
    with pytest.raises(WorkerError, match="rank 1 failed: max_model_len is 4096, but the model was made for 512"):
        make_engine(pair, tensor_parallel=2)


@pytest.mark.parametrize(("size", "why"), [(3, "heads is 4, which 3 ranks"), (8, "heads is 4, which 8 ranks")])
def test_sizes_that_do_not_divide_start_nothing(pair: Path, size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_engine(pair, tensor_parallel=size)


def test_a_configuration_survives_json(pair: Path) -> None:
    config = EngineConfig(model="m", speculation=speculation(pair, "ssd", fan_out=(4, 0, 1, 0, 3)))
    plain = to_plain(config)
    plain["speculation"]["fan_out"] = list(plain["speculation"]["fan_out"])
    assert from_plain(plain) == config


def test_no_rank_outlives_its_leader(pair: Path) -> None:
    """The leader is killed without a word; the others see it, and leave."""
    needs_devices(2)
    program = (
        "import sys; from pathlib import Path; from tests.engine.harness import make_engine\n"
        "engine = make_engine(Path(sys.argv[1]), tensor_parallel=2)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", program, str(pair)],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert leader.stdout is not None
    assert leader.stdout.readline() == "ready\n"
    (rank,) = children_of(leader.pid)
    leader.kill()
    leader.communicate()
    deadline = time.monotonic() + SOON_S
    while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}").exists()
