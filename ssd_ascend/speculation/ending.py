"""Whether drafting for a sequence is worth beginning before the scheduler has committed the step's tokens."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from ssd_ascend.core.sequence import Sequence


def surely_ends(seq: Sequence, new_tokens: Rows[int]) -> bool:
    """True when the scheduler will surely end `seq` with these tokens; a wrong "no" costs one useless draft."""
    if len(new_tokens) >= seq.num_remaining:
        return True
    return not seq.stop_ids.isdisjoint(new_tokens) and seq.num_output_tokens >= seq.sampling.min_tokens
