"""Blocks: who owns them, when they are found again, and that none is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend.errors import ConfigError
from ssd_ascend.kv.blocks import BlockManager, OutOfBlocksError


def filled(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """A table whose every token is computed."""
    table = blocks.allocate(len(tokens), blocks.match(tokens))
    blocks.register(table, tokens, len(tokens))
    return table


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 KV blocks"):
        BlockManager(0, 16, prefix_cache=True)


def test_growth_takes_only_what_is_missing_and_trim_gives_it_back() -> None:
    blocks = BlockManager(4, 4, prefix_cache=False)
    table = blocks.allocate(5)
    assert len(table) == 2
    blocks.grow(table, 8)
    assert len(table) == 2
    blocks.grow(table, 9)
    assert (len(table), blocks.num_free, blocks.num_used) == (3, 1, 3)
    assert blocks.can_grow(table, 16)
    assert not blocks.can_grow(table, 17)
    with pytest.raises(OutOfBlocksError, match="2 KV blocks wanted, 1 of 4"):
        blocks.grow(table, 17)
    blocks.trim(table, 4)
    blocks.check([table])
    assert (len(table), blocks.num_free) == (1, 3)


def test_giving_back_twice_is_noticed() -> None:
    blocks = BlockManager(2, 4, prefix_cache=False)
    table = blocks.allocate(4)
    again = list(table)
    blocks.free(table)
    assert table == []
    with pytest.raises(AssertionError, match="twice"):
        blocks.free(again)


@pytest.mark.parametrize(("num_tokens", "hit"), [(15, 3), (16, 3), (17, 4), (1, 0), (4, 0), (5, 1)])
def test_a_hit_never_covers_the_last_token(num_tokens: int, hit: int) -> None:
    """B25: four full blocks sent twice leave the fourth to be computed, because a token must be."""
    blocks = BlockManager(16, 4, prefix_cache=True)
    tokens = list(range(100, 100 + num_tokens))
    blocks.free(filled(blocks, [*tokens, 1, 2, 3, 4]))
    assert len(blocks.match(tokens)) == hit


def test_a_block_is_found_by_all_that_came_before_it() -> None:
    blocks = BlockManager(16, 4, prefix_cache=True)
    first = filled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.match([1, 2, 3, 4, 5, 6, 7, 8, 0]) == first[:2]
    assert blocks.match([1, 2, 3, 4, 0, 0, 0, 0, 9]) == first[:1]
    assert blocks.match([5, 6, 7, 8, 5, 6, 7, 8, 9]) == []  # same tokens, other place
    assert blocks.match([0, 2, 3, 4, 5, 6, 7, 8, 9]) == []


def test_without_prefix_cache_nothing_is_found() -> None:
    blocks = BlockManager(16, 4, prefix_cache=False)
    blocks.free(filled(blocks, list(range(9))))
    assert blocks.match(list(range(9))) == []


@pytest.mark.parametrize("before", range(1, 12))
@pytest.mark.parametrize("run", range(1, 9))
def test_a_run_across_a_block_edge_names_the_right_blocks(before: int, run: int) -> None:
    """Only blocks whose every token is computed get a name, and the name is that of their own tokens."""
    blocks = BlockManager(16, 4, prefix_cache=True)
    tokens = list(range(50, 50 + before + run))
    table = blocks.allocate(len(tokens) + 5)
    blocks.register(table, tokens[:before], before)
    blocks.register(table, tokens, before + run - 1)  # the last one is the recovery token: not computed
    assert blocks.match([*tokens, 0]) == table[: (before + run - 1) // 4]
    assert len(blocks._cached) == (before + run - 1) // 4


def test_registering_again_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockManager(300, 4, prefix_cache=True)
    tokens = list(range(1000))
    table = filled(blocks, tokens)
    monkeypatch.setattr("ssd_ascend.kv.blocks._content_key", lambda *_: pytest.fail("hashed again"))
    blocks.register(table, [*tokens, 1, 2], 1002)


def test_a_prompt_that_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockManager(300, 4, prefix_cache=True)
    tokens = list(range(1000))
    blocks.free(filled(blocks, tokens))
    keys: list[bytes] = []
    found = blocks.match(tokens, known_keys=keys)
    monkeypatch.setattr("ssd_ascend.kv.blocks._content_key", lambda *_: pytest.fail("hashed again"))
    assert blocks.match(tokens, known_keys=keys) == found
    assert len(found) == 249


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    blocks = BlockManager(4, 4, prefix_cache=True)
    old, young = list(range(8)), list(range(50, 58))
    blocks.free(filled(blocks, old))
    blocks.free(filled(blocks, young))
    assert blocks.num_free == 4
    taken = blocks.allocate(4)
    assert (len(blocks.match([*old, 0])), len(blocks.match([*young, 0]))) == (1, 2)
    hit = blocks.allocate(5, blocks.match([*old, 0])[:1])  # used again: now the youngest; its second block costs one
    blocks.free(hit)
    blocks.check([taken])
    assert (len(blocks.match([*old, 0])), len(blocks.match([*young, 0]))) == (1, 1)


def test_an_idle_hit_is_not_evicted_by_the_very_table_that_matched_it() -> None:
    blocks = BlockManager(3, 4, prefix_cache=True)
    tokens = list(range(9))
    blocks.free(filled(blocks, tokens))
    cached = blocks.match(tokens)
    assert blocks.num_needed(12, cached) == 3
    table = blocks.allocate(12, cached)
    assert table[:2] == cached
    blocks.check([table])


def test_needed_counts_idle_hits_but_not_used_ones() -> None:
    blocks = BlockManager(3, 4, prefix_cache=True)
    tokens = list(range(8))
    holder = filled(blocks, tokens)
    cached = blocks.match([*tokens, 0])
    assert blocks.num_needed(9, cached) == 1
    assert blocks.can_allocate(12, cached)
    assert not blocks.can_allocate(13, cached)
    blocks.free(holder)
    assert blocks.num_needed(9, cached) == 3


def test_two_tables_with_the_same_content_keep_one_name() -> None:
    blocks = BlockManager(8, 4, prefix_cache=True)
    tokens = list(range(8))
    first, second = blocks.allocate(8), blocks.allocate(8)
    for table in (first, second):
        blocks.register(table, tokens, 8)
    assert blocks.match([*tokens, 0]) == first
    blocks.free(second)
    blocks.check([first])
    blocks.free(first)
    blocks.check([])
    assert len(blocks.match([*tokens, 0])) == 2
    assert blocks.num_free == 8


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    blocks = BlockManager(8, 4, prefix_cache=False)
    trunk = blocks.allocate(12)
    fork = blocks.fork(trunk, 10)
    assert fork.table[:2] == trunk[:2]
    assert fork.copy == (trunk[2], fork.table[2])
    assert fork.table[2] != trunk[2]
    blocks.grow(fork.table, 14)
    edge = blocks.fork(trunk, 8)
    assert (edge.table, edge.copy) == (trunk[:2], None)
    blocks.check([trunk, fork.table, edge.table])
    assert blocks.num_used == 5
    blocks.free(trunk)
    blocks.check([fork.table, edge.table])
    blocks.free(fork.table)
    blocks.free(edge.table)
    assert blocks.num_used == 0


def test_a_fork_without_a_free_block_changes_nothing() -> None:
    blocks = BlockManager(2, 4, prefix_cache=False)
    trunk = blocks.allocate(7)
    with pytest.raises(OutOfBlocksError):
        blocks.fork(trunk, 7)
    blocks.check([trunk])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_lives_leak_nothing_and_never_lie(data: st.DataObject) -> None:
    """Slots remember what was written; whatever `match` finds must hold exactly the tokens that were asked for."""
    size = data.draw(st.sampled_from([1, 2, 4]), label="block size")
    blocks = BlockManager(data.draw(st.integers(1, 12), label="blocks"), size, prefix_cache=True)
    content: dict[int, tuple[int, ...]] = {}
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25), label="moves")):
        move = data.draw(st.sampled_from(["new", "new", "grow", "free", "fork"]))
        if move == "new":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            cached = blocks.match(tokens)
            for index, block in enumerate(cached):
                assert content[block] == tuple(tokens[: (index + 1) * size])
            if not blocks.can_allocate(len(tokens), cached):
                continue
            live.append((blocks.allocate(len(tokens), cached), tokens))
        elif live:
            table, tokens = live[data.draw(st.integers(0, len(live) - 1))]
            if move == "grow" and blocks.can_grow(table, len(tokens) + 4):
                tokens += data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
                blocks.grow(table, len(tokens) + 1)
                blocks.trim(table, len(tokens))
            elif move == "fork" and blocks.num_free:
                length = data.draw(st.integers(0, len(tokens)))
                live.append((blocks.fork(table, length).table, tokens[:length]))
            elif move == "free":
                blocks.free(table)
                live = [pair for pair in live if pair[0] is not table]
        for table, tokens in live:
            for index in range(len(tokens) // size):
                content[table[index]] = tuple(tokens[: (index + 1) * size])
            blocks.register(table, tokens, len(tokens))
        blocks.check(table for table, _ in live)
    for table, _ in live:
        blocks.free(table)
    blocks.check([])
    assert blocks.num_used == 0
