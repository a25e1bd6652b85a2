"""A request as the engine sees it: tokens so far, how many of them are in the KV cache, and where.

`Scheduler` is the only writer. Everyone else reads, or works on values handed along by the step. Torch-free.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ssd_ascend.core.sampling import SamplingParams


class Status(enum.Enum):
    """Where a sequence is in its life. Preempted sequences are WAITING again; nothing of their output is lost."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens.

    Invariant between steps, for a decoding sequence: `num_computed_tokens == len(token_ids) - 1`. The last token (the
    recovery token of the last verification) has been chosen but is not in the KV cache yet.
    """

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    """Token ids that end the answer: every EOS id of the model (unless ignored) and the request's own."""
    max_total_tokens: int
    """Hard cap on len(token_ids): min(prompt + max_tokens, model limit)."""
    seed: int
    arrival_s: float = 0.0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token of `stop_ids` that ended the answer, when one did."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache answered at first admission."""
    block_table: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    lookups: int = 0
    hits: int = 0
    steps: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the recovery token included."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """True when only the recovery token is missing from the KV cache."""
        return self.num_computed_tokens == len(self.token_ids) - 1 and self.num_output_tokens > 0

    @property
    def num_remaining(self) -> int:
        """Tokens this sequence may still emit."""
        return self.max_total_tokens - len(self.token_ids)
