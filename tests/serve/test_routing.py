"""Whom the router asks: prefixes go where they went before, crowds are avoided, nobody asks who is not ready."""

from __future__ import annotations

import json

from ssd_ascend.serve.routing import BLOCK_CHARS, Replica, block_names, choose


def chat(*contents: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text} for text in contents]}).encode()


def replicas(count: int = 2) -> list[Replica]:
    return [Replica(f"replica {i}", "127.0.0.1", 1 + i, is_ready=True) for i in range(count)]


def test_equal_beginnings_have_equal_names() -> None:
    long = "a conversation that goes on " * 40
    first, second = block_names(chat(long)), block_names(chat(long, "and on"))
    assert first
    assert second[: len(first) - 1] == first[:-1]
    assert block_names(chat("another", long))[0] != first[0]
    assert block_names(json.dumps({"prompt": long}).encode()) == block_names(json.dumps({"prompt": [long]}).encode())


def test_what_is_no_request_has_no_names() -> None:
    for body in (
        b"",
        b"no json",
        b"[]",
        b"{}",
        chat("short"),
        b'{"messages": 3}',
        b'{"prompt": {"a": 1}}',
        b"[" * 100_000,
    ):
        assert block_names(body) == []


def test_a_conversation_stays_where_it_is() -> None:
    two = replicas()
    names = block_names(chat("x" * 5 * BLOCK_CHARS))
    first = choose(two, names)
    assert first is not None
    first.remember(names)
    assert choose(two, block_names(chat("x" * 5 * BLOCK_CHARS, "more"))) is first
    other = choose(two, block_names(chat("y" * 5 * BLOCK_CHARS)))
    assert other is not None
    assert other is not first  # which is emptier


def test_a_crowded_holder_is_spared() -> None:
    two = replicas()
    names = block_names(chat("x" * 5 * BLOCK_CHARS))
    two[0].remember(names)
    two[0].in_flight = 4
    assert choose(two, names) is two[0]
    two[0].in_flight = 5
    assert choose(two, names) is two[1]


def test_only_the_ready_are_asked() -> None:
    two = replicas()
    names = block_names(chat("x" * 5 * BLOCK_CHARS))
    two[0].remember(names)
    two[0].is_ready = False
    assert choose(two, names) is two[1]
    two[1].is_ready = False
    assert choose(two, names) is None
    two[0].forget()
    assert two[0].held_blocks(names) == 0


def test_short_prompts_spread() -> None:
    three = replicas(3)
    for _ in range(9):
        chosen = choose(three, [])
        assert chosen is not None
        chosen.in_flight += 1
        chosen.requests += 1
    assert [replica.in_flight for replica in three] == [3, 3, 3]


def test_memory_is_bounded() -> None:
    replica = replicas(1)[0]
    for i in range(30):
        replica.remember(str((i, j)).encode() for j in range(1000))
    assert len(replica._held) == 20_000
    assert replica.held_blocks([str((29, 0)).encode()]) == 1
    assert replica.held_blocks([str((0, 0)).encode()]) == 0
