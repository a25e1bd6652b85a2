"""Long loops that leave an asyncio loop to others in between; `engine/async_engine.py` takes prompts so. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

_A_BREATH: Final = 64
"""So many prompts are taken in a few milliseconds."""
T = TypeVar("T")


async def breathing(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a pause for all else that the loop has to do after every few of them."""
    for number, item in enumerate(items):
        if number and number % _A_BREATH == 0:
            await asyncio.sleep(0)
        yield item
