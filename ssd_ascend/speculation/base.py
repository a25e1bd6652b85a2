"""The two axes of speculation as protocols: a `Speculator` says WHEN drafting happens, a `Drafter` says WHAT drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from ssd_ascend.core.batch import Awaited, ForwardBatch
from ssd_ascend.core.plan import DecodeRow
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Speculation, Verification, VerificationOutcome
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.runtime.pack import index_on


class FeatureReader(Protocol):
    """The target's captured hidden states of tokens already computed, kept beside the KV blocks they belong to."""

    features: torch.Tensor | None
    """The store itself: a row per slot."""

    def read_features(self, block_table: Rows[int], start: int, end: int) -> torch.Tensor:
        """Features of positions [start, end) of the sequence with this block table: [end - start, n_capture * H]."""
        ...

    def slots(self, block_table: Rows[int], start: int, end: int) -> np.ndarray:
        """Their rows in the store: int64 [end - start]."""
        ...


class Speculator(Protocol):
    """Answers `propose` for the rows of a step. May always decline: an empty row is an ordinary decode step."""

    lookahead: int
    """The most drafts a row can carry."""
    wants_features: bool
    stats: SpeculationStats

    def propose(self, rows: Rows[DecodeRow]) -> Speculation:
        """Drafts for each row, at most `row.max_drafts` of them."""
        ...

    def prepare(self, sequences: Rows[Sequence]) -> None:
        """The coming step reads prompts, all or parts of these, and nobody decodes in it."""
        ...

    def observe(self, sequences: Rows[Sequence], verification: Verification, *, read_prompts: bool) -> None:
        """The step's outcomes, before the scheduler commits them: row i of `verification` belongs to sequences[i].

        `sequences` still hold the tokens from before the step. First outcomes of new sequences come here too.
        read_prompts: the step read prompts, or parts of them, as well, so that its time says nothing about decoding.
        """
        ...

    def meanwhile(self, verdict: Awaited | None) -> None:
        """The step's forward is under way: time for what need not come before it. verdict: what it will bring, where
        that is known to be on its way."""
        ...

    def release(self, seq_ids: Rows[int]) -> None:
        """Forget sequences that finished, were aborted, or were preempted."""
        ...

    def tune(self, lookahead: int, fan_out: Rows[int]) -> None:
        """From now on rows carry so many drafts at most; more of them are of no use. fan_out: guesses per accepted
        length to prepare, where any are; empty leaves them as they are."""
        ...

    def health(self) -> str | None:
        """None when all is well, else one sentence saying why speculation is degraded."""
        ...

    def close(self) -> None:
        """Stop whatever was started."""
        ...


class Kept(NamedTuple):
    """Of a branch: tokens up to its guess, that one included, the guess, its drafts, and what else might have followed
    in each draft's place, equally many for each, one draft's after the other's."""

    num_tokens: int
    guess: int
    drafts: list[int]
    others: list[int]


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One sequence as a drafter sees it: the committed tokens, and what the drafter has computed for them.

    The drafter's KV cache holds *entries*. An entry is a token (ordinary draft models), or a token with the target
    feature of the position before it (EAGLE-3, which therefore has one entry less than there are tokens).
    """

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    features: torch.Tensor | None = None
    """Target features of positions features_start, features_start + 1, ...: [n, F]; only those not yet digested."""
    features_start: int = 0
    feature_slots: np.ndarray | None = None
    """Where a drafter beside its target finds them instead: int64 [n], rows of the target's own store of features."""
    block_table: list[int] = field(default_factory=list)
    num_entries: int = 0
    """Entries of committed tokens in the drafter's cache."""
    others: list[Kept] = field(default_factory=list)
    """Of each branch that was drafted last, where that is kept."""
    drafted: Callable[[], Rows[int]] | None = None
    """Tokens of the entries that follow, from the last drafting; valid as far as they were accepted. A call, as they
    may still be on their way from the device."""
    key: int = field(default_factory=itertools.count().__next__)
    """By what a drafter keeps state for it: unlike `id`, no other sequence has it, of whatever target."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the recovery token included."""
        return len(self.token_ids)

    @property
    def features_end(self) -> int:
        """Positions below this one have features that are known here, or were digested."""
        held = self.features if self.feature_slots is None else self.feature_slots
        return self.features_start + (0 if held is None else int(held.shape[0]))

    def grow(self, tokens: Rows[int], features: torch.Tensor | None, slots: np.ndarray | None) -> None:
        """Tokens that the target has put, and their features or where these are, as far as the drafter wants them."""
        self.token_ids += tokens
        if features is not None:
            self.features = features if self.features is None else torch.cat((self.features, features))
        if slots is not None:
            held = [] if self.feature_slots is None else [self.feature_slots]
            self.feature_slots = np.concatenate([*held, slots])

    def drop_features(self, end: int) -> None:
        """Forget the features of positions below `end`."""
        count = end - self.features_start
        if count <= 0 or (self.features is None and self.feature_slots is None):
            return
        if self.features is not None:
            self.features = self.features[count:]
        if self.feature_slots is not None:
            self.feature_slots = self.feature_slots[count:]
        self.features_start = end


class Chain(NamedTuple):
    """K tokens deep drafts for R rows, on the drafter's device.

    tokens: int64 [R, K], target vocabulary. num_tokens: host, how many of them count. law: [R, K, Vd] log-weights each
    token was drawn from, over the draft vocabulary, or None when nothing was drawn. has_law: host, per row.
    hidden: [R, K, H] the drafter's own feature after each token's predecessor, or None.
    """

    tokens: torch.Tensor
    num_tokens: list[int]
    law: torch.Tensor | None
    has_law: list[bool]
    hidden: torch.Tensor | None


def spread(chain: Chain, rows: Rows[int], num_rows: int) -> Chain:
    """A chain of the given rows as one of all `num_rows` rows, the others without tokens."""
    if len(rows) == num_rows:
        return chain
    index = index_on(rows, chain.tokens.device)

    def place(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.new_zeros((num_rows, *part.shape[1:])).index_copy_(0, index, part)

    num_tokens, has_law = [0] * num_rows, [False] * num_rows
    for at, row in enumerate(rows):
        num_tokens[row], has_law[row] = chain.num_tokens[at], chain.has_law[at]
    tokens = place(chain.tokens)
    assert tokens is not None
    return Chain(tokens, num_tokens, place(chain.law), has_law, place(chain.hidden))


def pick(chain: Chain, rows: Rows[int]) -> Chain:
    """The given rows of a chain, in that order."""
    index = index_on(rows, chain.tokens.device)
    law, hidden = (None if part is None else part.index_select(0, index) for part in (chain.law, chain.hidden))
    num_tokens, has_law = [chain.num_tokens[row] for row in rows], [chain.has_law[row] for row in rows]
    return Chain(chain.tokens.index_select(0, index), num_tokens, law, has_law, hidden)


class Glue(NamedTuple):
    """The drafter's view of a speculation under verification: one row per number of accepted drafts.

    scores: float32 [R, Vt] log-weights of the next token, target vocabulary, packed: sequence i owns num_rows[i] rows,
    for 0, 1, ... accepted drafts. hidden: [R, H] or None. num_rows: host; 0 for a sequence the drafter has no memory
    for.
    """

    scores: torch.Tensor
    hidden: torch.Tensor | None
    num_rows: list[int]


class Branch(NamedTuple):
    """A guess: sequence `seq` has `depth` drafts accepted and then the target puts the guessed token.

    `glue_row` is the row of the `Glue` that foresaw it; the guessed tokens themselves travel as one device tensor.
    """

    seq: DraftSequence
    depth: int
    glue_row: int


class Foresight(NamedTuple):
    """What a drafter has ready, all of it greedy: drafts[i] for when outcomes[i] comes true; hidden: [R, K, H] of these
    drafts as in `Chain`, or None."""

    outcomes: list[VerificationOutcome]
    drafts: list[list[int]]
    hidden: torch.Tensor | None


class BranchChoice(Protocol):
    """Says for which outcomes a round of captured graphs drafts; see `guesser.py`."""

    def width(self, widths: Rows[int], *, ahead: bool) -> int:
        """One of these numbers of branches, for every sequence of the round. ahead: glue shares a forward."""
        ...

    def picks(self, num_drafts: int, num_ranks: int, most: int) -> list[tuple[int, int]]:
        """(depth, rank) of up to `most` guesses for a sequence with so many drafts, by depth."""
        ...


@runtime_checkable
class ForeseeingDrafter(Protocol):
    """A drafter that can glue, fork and decode its branches in one go."""

    @property
    def whole_chain(self) -> int:
        """Length of the chains that come in one go, too; 0 when every step is its own."""
        ...

    def foresee(
        self,
        seqs: Rows[DraftSequence],
        sent: Rows[Rows[int]],
        hidden: Rows[torch.Tensor | None],
        k: int,
        choice: BranchChoice,
        *,
        hurry: bool,
        meanwhile: Callable[[], None],
    ) -> Foresight | None:
        """`glue`, the guesses that `choice` says, and `branch` k deep; None where this round must go step by step.

        hurry: the target waits for this, so that a branch may be a draft shorter where that saves a forward.
        meanwhile: called while the device works, where there is one that does.
        """
        ...


class Verdict(NamedTuple):
    """A verification under way, as far as the host knows it: `ModelOutput.greedy` of all its rows, and of each sequence
    that goes on, its first row there, its drafts, and the position of its last token."""

    greedy: torch.Tensor
    first: list[int]
    num_drafts: list[int]
    start: list[int]


@runtime_checkable
class FollowingDrafter(Protocol):
    """A drafter beside its target that may be told of a verdict before the host has seen it."""

    @property
    def follows(self) -> bool:
        """Whether it is prepared for that here."""
        ...

    def follow(self, seqs: Rows[DraftSequence], verdict: Verdict, verify: ForwardBatch) -> torch.Tensor | None:
        """Queue a chain after whatever the verdict will be; the inputs of its verification go into the staged `verify`.

        Returns the drafts, good until the next call; None where it cannot be. `seqs` are as of before the verdict.
        """
        ...

    def caught_up(self, seq: DraftSequence) -> None:
        """The verdict is there, and in `seq`: the chain under way has computed all its tokens."""
        ...

    def kept(self, seq: DraftSequence, drafts: Rows[int]) -> None:
        """The verdict on a chain that `follow` queued is in `seq`, and no other chain is under way: these stood."""
        ...


@runtime_checkable
class AheadSpeculator(Protocol):
    """A speculator whose rounds may be queued before the verdict of the one before is on the host."""

    @property
    def goes_ahead(self) -> bool:
        """Whether it is prepared for that here."""
        ...

    def draft_ahead(self, sequences: Rows[Sequence], verdict: Verdict, verify: ForwardBatch) -> bool:
        """Queue drafting after a verdict, see `FollowingDrafter.follow`; False where it cannot be.

        The next `propose` that is asked for some of these sequences says which rows of `verify` are theirs.
        """
        ...


class NextRow(NamedTuple):
    """A sequence's row of the step after this one: its last token, not yet in `seq`, and drafts behind that. `end`:
    positions up to the last draft."""

    seq: Sequence
    token: int
    drafts: list[int]
    end: int


@runtime_checkable
class LookingUpSpeculator(Protocol):
    """A speculator that knows the next step's drafts, as a rule, before the scheduler has committed this one's."""

    def queue_with(self, queue: Callable[[Rows[NextRow]], bool]) -> None:
        """From now on have steps run by `queue` that are known: all rows that go on. It says whether they are."""
        ...


class Drafter(Protocol):
    """What drafts. Every method may be called for any mix of sequences; none keeps state outside `DraftSequence`."""

    wants_features: bool
    to_target: torch.Tensor | None
    """int64 [Vd]: target id of each draft id; None when the two vocabularies are one."""

    def chain(self, seqs: Rows[DraftSequence], lookahead: int) -> Chain:
        """Draft after the last committed token. A sequence without memory gets num_tokens 0."""
        ...

    def glue(self, seqs: Rows[DraftSequence], sent: Rows[Rows[int]], hidden: Rows[torch.Tensor | None]) -> Glue:
        """Run over what is committed and the drafts now under verification: `sent[i]` with their features hidden[i]."""
        ...

    def branch(
        self,
        branches: Rows[Branch],
        guesses: torch.Tensor,
        glue: Glue,
        sent: Rows[Rows[int]],
        k: int,
        should_stop: Callable[[], bool],
    ) -> Chain:
        """Draft k tokens after each guess, int64 [len(branches)], as if it had come true.

        `sent[i]` is for branches[i]. `should_stop` is asked between steps; once it says so, the chain is handed over as
        long as it is (one token at least).
        """
        ...

    def release(self, seq: DraftSequence) -> None:
        """Give back the memory of a sequence."""
        ...
