"""Who owns which KV block: reference counts, tables, and the prefix cache. Numbers only; tensors live in `kv/cache.py`.

A block is *used* (some table refers to it), *idle* (no table does, but its content is known and a later prompt may
match it) or *blank*. Idle blocks count as free: they are evicted once no blank one is left, least recently used first.
Called by the scheduler for the target's cache and by the draft worker for its own. Torch-free.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from ssd_ascend.errors import ConfigError, SsdError

_ROOT = b""


class OutOfBlocksError(SsdError):
    """More blocks were asked for than are free; callers ask `can_*` first, so this is a fault of the caller."""


class Fork(NamedTuple):
    """A table that shares the full blocks of another one."""

    table: list[int]
    copy: tuple[int, int] | None
    """(from, to): the partial last block, whose content must be copied before the fork is written to."""


def _content_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name a full block by everything up to its end. 128 bits of a cryptographic hash: equal keys mean equal tokens."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens. A table is a plain list of block ids, in token order."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"{num_blocks} KV blocks of {block_size} tokens cannot hold a sequence",
                remedy="give the KV cache more memory",
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        """Content of a block, once every token in it is computed."""
        self._cached: dict[bytes, int] = {}
        """The one block that answers for a content; others may hold the same content while they are used."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._blank = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that some table refers to."""
        return self.num_blocks - self.num_free

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has the whole cache."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    # -- tables ------------------------------------------------------------------------------------------------------

    def room(self, table: Sequence[int]) -> int:
        """Tokens `table` could hold if it took every free block."""
        return (len(table) + self.num_free) * self.block_size

    def num_needed(self, num_tokens: int, cached: Sequence[int] = ()) -> int:
        """Free blocks that `allocate` with the same arguments takes: new ones, and cached ones that lie idle."""
        revived = sum(1 for block in cached if self._refs[block] == 0)
        return self.blocks_for(num_tokens) - len(cached) + revived

    def can_allocate(self, num_tokens: int, cached: Sequence[int] = ()) -> bool:
        """True when `allocate` with the same arguments will succeed."""
        return self.num_needed(num_tokens, cached) <= self.num_free

    def allocate(self, num_tokens: int, cached: Sequence[int] = ()) -> list[int]:
        """A new table with slots for `num_tokens` tokens that begins with the blocks `match` found."""
        self._demand(self.num_needed(num_tokens, cached))
        for block in cached:  # before any new block is taken: taking one may evict an idle block
            self._refs[block] += 1
            self._idle.pop(block, None)
        table = list(cached)
        self.grow(table, num_tokens)
        return table

    def can_grow(self, table: Sequence[int], num_tokens: int) -> bool:
        """True when `grow` with the same arguments will succeed."""
        return num_tokens <= self.room(table)

    def grow(self, table: list[int], num_tokens: int) -> None:
        """Append blocks until `table` has slots for `num_tokens` tokens."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return
        self._demand(missing)
        table.extend(self._take() for _ in range(missing))

    def trim(self, table: list[int], num_tokens: int) -> None:
        """Give back the blocks of `table` beyond those that `num_tokens` tokens need."""
        needed = self.blocks_for(num_tokens)
        while len(table) > needed:
            self._release(table.pop())

    def free(self, table: list[int]) -> None:
        """Give back every block and empty `table`. The end goes first: a prefix outlives what hangs on it."""
        while table:
            self._release(table.pop())

    def fork(self, table: Sequence[int], num_tokens: int) -> Fork:
        """Share the first `num_tokens` tokens of `table` with a new one, which may then grow on its own."""
        num_full = num_tokens // self.block_size
        assert self.blocks_for(num_tokens) <= len(table), "a fork cannot be longer than its trunk"
        is_partial = num_tokens % self.block_size > 0
        self._demand(int(is_partial))
        shared = list(table[:num_full])
        for block in shared:
            self._refs[block] += 1
        if not is_partial:
            return Fork(shared, None)
        own = self._take()
        return Fork([*shared, own], (table[num_full], own))

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], *, known_keys: list[bytes] | None = None) -> list[int]:
        """Cached blocks that hold the beginning of `token_ids`, never its last token: one must be left to compute.

        Changes nothing. `len(result) * block_size` is the length of the hit, the only number there is for it.
        `known_keys` remembers content keys between calls with the same tokens, so that a prompt is hashed once.
        """
        found: list[int] = []
        if not self.prefix_cache:
            return found
        keys = known_keys if known_keys is not None else []
        parent = _ROOT
        for index in range((len(token_ids) - 1) // self.block_size):
            if index == len(keys):
                keys.append(self._key_at(parent, token_ids, index))
            parent = keys[index]
            block = self._cached.get(parent)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, table: Sequence[int], token_ids: Sequence[int], num_computed: int) -> None:
        """Make every full block of `table` whose tokens are all among the first `num_computed` findable by `match`.

        Costs nothing when no block has filled up since the last call: a block that has its key is not hashed again.
        """
        if not self.prefix_cache:
            return
        end = num_computed // self.block_size
        first = end
        while first > 0 and self._keys[table[first - 1]] is None:
            first -= 1
        for index in range(first, end):
            parent = self._keys[table[index - 1]] if index > 0 else _ROOT
            assert parent is not None
            key = self._key_at(parent, token_ids, index)
            self._keys[table[index]] = key
            self._cached.setdefault(key, table[index])

    def _key_at(self, parent: bytes, token_ids: Sequence[int], index: int) -> bytes:
        return _content_key(parent, token_ids[index * self.block_size : (index + 1) * self.block_size])

    # -- single blocks -----------------------------------------------------------------------------------------------

    def _demand(self, count: int) -> None:
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.num_free} of {self.num_blocks} are free")

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._keys[block]
            assert key is not None
            del self._cached[key]
            self._keys[block] = None
        self._refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        assert self._refs[block] > 0, f"block {block} is given back twice"
        self._refs[block] -= 1
        if self._refs[block] > 0:
            return
        key = self._keys[block]
        if key is not None and self._cached.setdefault(key, block) == block:
            self._idle[block] = None
        else:
            self._keys[block] = None
            self._blank.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that `tables` are all there are, and that no block is lost, shared by accident or wrongly named."""
        counts = Counter(block for table in tables for block in table)
        assert all(self._refs[block] == counts[block] for block in range(self.num_blocks)), "reference counts drifted"
        unused = [*self._blank, *self._idle]
        assert len(unused) == len(set(unused)), "a block is free twice"
        assert set(unused) == {block for block in range(self.num_blocks) if not counts[block]}, "a block leaked"
        assert all(self._keys[block] is None for block in self._blank), "a blank block has a content"
        assert all(self._keys[block] == key for key, block in self._cached.items()), "a content names the wrong block"
        assert all(self._cached[key] == block for block in self._idle if (key := self._keys[block])), (
            "an orphan is idle"
        )
