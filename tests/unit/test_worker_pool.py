"""Several speculators as one: what is asked of the pool is asked of all."""

from __future__ import annotations

from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.speculation.worker_pool import WorkerPool
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
