"""Which part of a weight lives on which rank. The only home of these rules; sizes of 1 fall out as "all of it"."""

from __future__ import annotations

from ssd_ascend.backends.base import Collectives
from ssd_ascend.errors import ConfigError


def even_shard(total: int, ranks: Collectives, *, what: str) -> slice:
    """This rank's equal share of `total`; ConfigError naming `what` when it does not divide."""
    if total % ranks.size:
        raise ConfigError(
            f"{what} is {total}, which {ranks.size} ranks cannot share evenly", remedy="choose another --tp"
        )
    share = total // ranks.size
    return slice(ranks.rank * share, (ranks.rank + 1) * share)


def kv_head_shard(num_kv_heads: int, ranks: Collectives) -> slice:
    """This rank's key-value heads. With more ranks than heads, neighbours hold copies of the same head."""
    if ranks.size <= num_kv_heads:
        return even_shard(num_kv_heads, ranks, what="the number of key-value heads")
    if ranks.size % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} key-value heads cannot be copied evenly to {ranks.size} ranks",
            remedy="choose another --tp",
        )
    head = ranks.rank * num_kv_heads // ranks.size
    return slice(head, head + 1)


def padded_shard(total: int, ranks: Collectives) -> tuple[slice, int]:
    """This rank's rows of a vocabulary, and the equal number of rows every rank holds (the last ones are padding)."""
    share = -(-total // ranks.size)
    start = min(ranks.rank * share, total)
    return slice(start, min(start + share, total)), share


def length(span: slice) -> int:
    """How many items a shard holds."""
    return int(span.stop - span.start)


def scaled(span: slice, factor: int) -> slice:
    """A shard of heads as a shard of rows."""
    return slice(span.start * factor, span.stop * factor)
