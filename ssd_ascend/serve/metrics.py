"""What `/metrics` shows, in Prometheus' text format. Names begin with `ssd_`; `docs/api.md` lists them.

Counters of the step loop come from the engine's last snapshot; what clients saw (requests, kept tokens, latencies) is
counted here, in the front end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ssd_ascend.core.stats import EngineStats, SpeculationStats
from ssd_ascend.engine.answers import AnswerDelta
from ssd_ascend.engine.async_engine import Loss

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_ANSWER_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """The metrics of one server; `snapshot` gives the engine's latest counters, `up` says whether it serves."""

    def __init__(self, snapshot: Callable[[], EngineStats], up: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("ssd_requests", "HTTP requests answered", ["path", "status"], registry=registry)
        self.disconnects = Counter("ssd_client_disconnects", "Answers whose client left", registry=registry)
        self._answers = Counter("ssd_answers", "Answers finished, by reason", ["finish_reason"], registry=registry)
        self._tokens = Counter("ssd_generation_tokens", "Tokens kept in answers", registry=registry)
        self._prompt_tokens = Counter("ssd_prompt_tokens", "Prompt tokens of finished answers", registry=registry)
        self._first = Histogram(
            "ssd_time_to_first_token_seconds", "Submission to first token", buckets=_FIRST_TOKEN_S, registry=registry
        )
        self._gap = Histogram(
            "ssd_inter_token_seconds", "Time per token after the first", buckets=_TOKEN_S, registry=registry
        )
        self._answer = Histogram("ssd_answer_seconds", "Submission to last token", buckets=_ANSWER_S, registry=registry)
        self._losses = Counter("ssd_engine_losses", "Engines lost, by how", ["how"], registry=registry)
        for how in Loss:
            self._losses.labels(how.value)  # shown from the start: who watches for an increase needs the zero before it
        registry.register(_EngineCollector(snapshot, up))

    def on_delta(self, delta: AnswerDelta) -> None:
        """Count what one step gave one answer; a step of several tokens counts as many, equally long."""
        count = len(delta.token_ids)
        if count:
            self._tokens.inc(count)
            if delta.is_first:
                self._first.observe(delta.waited_s)
                count -= 1
            else:
                for _ in range(count):
                    self._gap.observe(delta.waited_s / count)
        if delta.finish_reason is not None:
            self._answers.labels(delta.finish_reason).inc()
            if delta.stats is not None:
                self._prompt_tokens.inc(delta.stats.prompt_tokens)
                self._answer.observe(delta.stats.ttft_s + delta.stats.decode_s)

    def on_loss(self, loss: Loss) -> None:
        """Count an engine that was lost."""
        self._losses.labels(loss.value).inc()

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's snapshot whenever the page is rendered."""

    def __init__(self, snapshot: Callable[[], EngineStats], up: Callable[[], bool]) -> None:
        self._snapshot = snapshot
        self._up = up

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot()
        yield _gauge("ssd_engine_up", "1 while the engine serves", float(self._up()))
        yield _gauge("ssd_requests_running", "Sequences in the running batch", stats.running)
        yield _gauge("ssd_requests_waiting", "Sequences waiting for room", stats.waiting)
        yield _gauge("ssd_kv_blocks_used", "KV blocks in use", stats.kv_blocks_used)
        yield _gauge("ssd_kv_blocks_total", "KV blocks there are", stats.kv_blocks_total)
        yield _gauge(
            "ssd_kv_usage_ratio", "Share of KV blocks in use", _ratio(stats.kv_blocks_used, stats.kv_blocks_total)
        )
        yield _counter("ssd_engine_steps", "Steps of the engine", stats.steps)
        yield _counter("ssd_preemptions", "Sequences put back to make room", stats.preemptions)
        yield _counter("ssd_prefill_tokens", "Prompt tokens of admitted sequences", stats.prompt_tokens)
        yield _counter("ssd_cached_tokens", "Prompt tokens the prefix cache answered", stats.cached_tokens)
        yield _counter("ssd_engine_tokens", "Tokens generated, those behind a stop string too", stats.generation_tokens)
        yield from _speculation(stats.speculation)


def _speculation(stats: SpeculationStats) -> Iterator[Metric]:
    yield _counter("ssd_verify_rows", "Rows verified with at least one draft", stats.verify_rows)
    yield _counter("ssd_declined_rows", "Rows the speculator declined", stats.declined_rows)
    yield _counter("ssd_drafted_tokens", "Draft tokens shown to the target", stats.drafted)
    yield _counter("ssd_accepted_tokens", "Draft tokens accepted and emitted", stats.accepted)
    yield _by_position("ssd_drafted_tokens_per_position", "Draft tokens by position", stats.drafted_per_position)
    yield _by_position("ssd_accepted_tokens_per_position", "Accepted by position", stats.accepted_per_position)
    yield _counter("ssd_wasted_draft_tokens", "Draft tokens never shown to the target", stats.wasted)
    yield _counter("ssd_speculation_cache_lookups", "Look-ups in the speculation cache", stats.lookups)
    yield _counter("ssd_speculation_cache_hits", "Look-ups the speculation cache answered", stats.hits)
    yield _counter("ssd_hit_tokens", "Tokens emitted by rows that were hits", stats.hit_tokens)
    yield _counter("ssd_miss_rows", "Rows drafted on demand", stats.miss_rows)
    yield _counter("ssd_miss_tokens", "Tokens emitted by rows drafted on demand", stats.miss_tokens)
    yield _gauge("ssd_accepted_length_on_hit", "Tokens per hit row", _ratio(stats.hit_tokens, stats.hits))
    yield _gauge("ssd_accepted_length_on_miss", "Tokens per missed row", _ratio(stats.miss_tokens, stats.miss_rows))
    yield _counter("ssd_draft_idle_seconds", "Time the drafter waited for the target", stats.draft_idle_s)
    yield _counter("ssd_target_wait_seconds", "Time the target waited for drafts", stats.target_wait_s)
    yield _counter("ssd_speculator_restarts", "Times the speculator's worker was restarted", stats.worker_restarts)
    yield _gauge("ssd_speculator_up", "0 when the speculator's worker is lost", float(stats.worker_alive))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)


def _by_position(name: str, meaning: str, values: list[int]) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=["position"])
    for position, value in enumerate(values):
        family.add_metric([str(position)], value)
    return family
