"""Several speculators as one: what is asked of the pool is asked of all."""

from __future__ import annotations

from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.speculation.worker_pool import WorkerPool
from ssd_ascend.transport.messages import Foreseen, Update
from tests.unit.test_worker_client import Link


def test_counters_are_whole_whoever_asks() -> None:
    """Steps whose outcomes were all foreseen wait for no answer, and may be all there are."""
    stats = SpeculationStats()
    pool = WorkerPool([Link(), Link()], stats, target_vocab=9, lookahead=3, silence_s=1.0)
    for number, client in enumerate(pool._clients):
        client.stats.hits, client.stats.lookups = 3 + number, 5
    pool.is_ready()
    assert (stats.hits, stats.lookups) == (7, 10)
    pool._clients[0].stats.hits += 1
    pool.health()
    assert stats.hits == 8


def told(seq_id: int, recovery: int, *drafts: int) -> Foreseen:
    """One outcome of a sequence that has 4 tokens."""
    entries = [0, recovery, len(drafts), *drafts]
    return Foreseen(number=1, lookahead=len(drafts), seq_ids=[seq_id], num_tokens=[4], counts=[1], entries=entries)


def test_what_a_look_up_finds_is_noted_by_whose_sequence_it_is() -> None:
    """Each worker's sequences: one that was foreseen, one that nobody would draft for, one that waits for an answer."""
    stats = SpeculationStats()
    pool = WorkerPool([Link(), Link()], stats, target_vocab=9, lookahead=3, silence_s=1.0)
    pool._ready = pool._clients
    first, second = pool._clients
    first.attached, second.attached = {1, 2}, {3}
    first._ahead.take_in(told(1, 5, 6, 7, 8), first.attached)
    first._ahead.take_in(told(2, 5, 6, 7, 8), first.attached)
    first._ahead._worth_from = 2
    assert [pool.foretold(seq_id) for seq_id in (1, 3)] == [VerificationOutcome(1, 0, 5), None]

    outcomes = [VerificationOutcome(1, 0, 5), VerificationOutcome(2, 0, 1), VerificationOutcome(3, 0, 5)]
    steps = [Update(outcome=one, num_tokens_before=4, new_tokens=[one.recovery_token]) for one in outcomes]
    for _ in range(2):
        looked = pool.look_up(steps)
        assert (looked.drafts, looked.declined, looked.is_settled) == ({1: [6, 7, 8]}, {2}, False)
        assert first.stats.lookups == 0, "looking is not noting"
    assert pool.look_up(steps[:2]).is_settled
    pool.note(looked)
    assert [(client.stats.lookups, client.stats.hits) for client in (first, second)] == [(2, 1), (0, 0)]
    assert [sorted(client._open) for client in (first, second)] == [[], [3]]
