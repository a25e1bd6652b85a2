"""The line between front end and engine process: every message comes back as it was, and no byte is lost or waits."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.request import EngineRequest, SequenceStats, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import TokenLogprobs
from ssd_ascend.core.stats import EngineStats, SpeculationStats
from ssd_ascend.engine import messages as m
from ssd_ascend.engine.channel import ChannelClosedError, EngineChannel
from ssd_ascend.engine.identity import EngineInfo, EngineLimits

SAMPLING = SamplingParams(
    seed=-(1 << 63), logit_bias={3: -1.5, 70000: 2.0}, stop=("a", "é"), stop_token_ids=(1, 2), max_tokens=9, logprobs=5
)
COMMANDS = [
    m.Start(EngineConfig(model="x", speculation=SpeculationConfig(speculator="ssd", lookahead=2, fan_out=(3, 2, 1)))),
    m.Start(EngineConfig(model="x", speculation=SpeculationConfig(lookahead="auto", fan_out="auto"))),
    m.Submit([EngineRequest(id=1, prompt_token_ids=[1, 2, 3], sampling=SAMPLING)]),
    m.Abort([1, 2]),
    m.Shutdown(),
]
DELTA = TokenDelta(
    seq_id=7,
    token_ids=[5, 6],
    logprobs=[TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, float("-inf")))), TokenLogprobs(6, -0.1, 2, ())],
    sources=[2, 0],
    finish_reason="stop",
    stop_token=6,
    stats=SequenceStats(prompt_tokens=3, steps=1),
)
REPORTS = [
    m.Progress("loading", 3, 10),
    m.Ready(
        EngineLimits(max_model_len=10, max_tokens_that_fit=9, vocab_size=8),
        EngineInfo(
            model="x", device="cpu", dtype="float32", speculator="sd", drafter="ngram", lookahead=3, kv_cache_bytes=1
        ),
    ),
    m.Failed("why"),
    m.Rejected(3, "no", "prompt"),
    m.Rejected(3, "no", "prompt", "context_length_exceeded"),
    m.Stepped([DELTA]),
    m.Stats(EngineStats(running=1, speculation=SpeculationStats(accepted_per_position=[2, 1])), "a worker is lost"),
]


@pytest.fixture
def ends() -> Iterator[tuple[EngineChannel, socket.socket]]:
    theirs, ours = socket.socketpair()
    ours.settimeout(10)
    with EngineChannel(theirs) as channel, ours:
        yield channel, ours


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_commands_come_back(command: m.Command) -> None:
    assert m.parse_command(m.frame(command)[m.HEADER.size :]) == command


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: type(r).__name__)
def test_reports_come_back(report: m.Report) -> None:
    assert m.parse_report(m.frame(report)[m.HEADER.size :]) == report


def test_commands_cut_anywhere(ends: tuple[EngineChannel, socket.socket]) -> None:
    channel, front = ends
    data = b"".join(m.frame(command) for command in COMMANDS)
    found: list[m.Command] = []
    for byte in data:
        front.sendall(bytes([byte]))
        found += channel.commands(most_s=0.0)
    assert found == COMMANDS
    front.sendall(data)
    assert channel.commands(most_s=None) == COMMANDS


def test_a_reader_that_lags_stops_nobody_and_loses_nothing(ends: tuple[EngineChannel, socket.socket]) -> None:
    channel, front = ends
    sent = [m.Stepped([TokenDelta(seq_id=i, token_ids=list(range(500)))]) for i in range(2000)]
    for report in sent:  # far more than a socket holds
        channel.send(report)
    data, found = b"", []
    while len(found) < len(sent):
        channel.commands(most_s=0.0)  # what was kept leaves as the reader makes room
        data += front.recv(1 << 16)
        while len(data) >= m.HEADER.size and len(data) >= (size := m.HEADER.unpack_from(data)[0] + m.HEADER.size):
            found.append(m.parse_report(data[m.HEADER.size : size]))
            data = data[size:]
    assert found == sent


def test_the_end_of_the_front_end_is_noticed(ends: tuple[EngineChannel, socket.socket]) -> None:
    channel, front = ends
    front.close()
    with pytest.raises(ChannelClosedError):
        channel.commands(most_s=None)
    with pytest.raises(ChannelClosedError):
        channel.send(m.Progress("loading"))
