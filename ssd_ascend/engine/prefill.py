"""How one step's prefill budget is split among prompts. Pure numbers; used by `Scheduler.schedule` only. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Numbers


def fair_share(budget: int) -> int:
    """Tokens one prompt may claim while others wait: half, so that a long prompt does not lock out a short one."""
    return -(-budget // 2)


def split_budget(wanted: Numbers[int], budget: int) -> list[int]:
    """Tokens for each prompt, oldest first: up to its fair share; what is left over then goes to the oldest again.

    First come, first served keeps the slowest first token within about twice the median when prompts are alike;
    splitting evenly instead would make every prompt as late as the last one.
    """
    share = fair_share(budget)
    lengths = []
    for want in wanted:
        lengths.append(min(share, budget, want))
        budget -= lengths[-1]
    for index, want in enumerate(wanted):
        more = min(budget, want - lengths[index])
        lengths[index] += more
        budget -= more
    return lengths
