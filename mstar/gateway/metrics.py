"""The Prometheus view of the gateway: snapshots turned into families when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mstar.gateway.latency import Histogram
from mstar.gateway.service import Service

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "running": "Sequences that hold a slot",
    "waiting": "Sequences that wait for a slot",
    "slots": "Slots of the rank",
    "pages_total": "Pages of the key-value cache",
    "pages_free": "Pages that are free",
    "pages_cached": "Pages that no sequence holds and that are kept for prompts that begin alike",
}
_COUNTERS = {
    "step": "Steps that landed",
    "preempted": "Sequences that gave their pages up to older ones and were computed again",
    "refused": "Sequences the rank refused",
    "page_refusals": "Times that a sequence asked for pages and there were none",
    "squeezed_steps": "Steps that the target ITL left no room for the smallest chunk, which ran all the same",
    "evicted": "Cached pages given to sequences that needed room",
    "finished": "Sequences the rank finished",
    "generated_tokens": "Tokens generated",
    "prompt_tokens": "Prompt tokens of sequences that got a slot, each time they did",
    "cached_tokens": "Prompt tokens that lay in cached or shared pages and were not computed",
    "stale_results": "Results of rows that were gone",
    "step_seconds": "Seconds in forward passes",
    "host_seconds": "Seconds of host time in steps",
}


class Metrics(Collector):
    """Renders a service's statistics; has a registry of its own, so nothing else shows up in it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families, from one snapshot."""
        yield from self._requests()
        yield from self._latencies()
        yield from self._ranks()
        yield from self._actors()
        yield from self._memory()

    def _requests(self) -> Iterator[Metric]:
        found = self._service.statistics()
        ended = CounterMetricFamily("mstar_requests", "Requests that ended", labels=["outcome"])
        for outcome in ("done", "failed", "cancelled"):
            ended.add_metric([outcome], found.book.outcomes.get(outcome, 0))
        yield ended
        refused = CounterMetricFamily("mstar_requests_refused", "Answers that were errors", labels=["status"])
        for status, count in sorted(found.refused.items()):
            refused.add_metric([str(status)], count)
        yield refused
        finished = CounterMetricFamily("mstar_choices", "Choices by finish reason", labels=["reason"])
        for reason in ("stop", "length"):
            finished.add_metric([reason], found.book.reasons.get(reason, 0))
        yield finished
        yield GaugeMetricFamily("mstar_requests_live", "Requests being served", found.book.requests)
        yield GaugeMetricFamily("mstar_sequences_live", "Sequences being served", found.book.sequences)
        yield GaugeMetricFamily("mstar_ready", "1 while requests are taken", int(self._service.open))
        yield CounterMetricFamily(
            "mstar_prompt_tokens", "Prompt tokens of ended requests", found.prompt_tokens
        )
        yield CounterMetricFamily(
            "mstar_generated_tokens", "Generated tokens of ended requests", found.generated_tokens
        )
        yield CounterMetricFamily("mstar_rows", "Token rows accepted", found.book.rows)
        yield CounterMetricFamily("mstar_stale_rows", "Token rows dropped as late", found.book.stale)
        yield CounterMetricFamily("mstar_row_gaps", "Token rows out of order", found.book.gaps)
        yield CounterMetricFamily("mstar_malformed_records", "Records that did not decode", found.malformed)
        yield CounterMetricFamily(
            "mstar_slow_readers_cut", "Streams cut for slow reading", found.slow_readers
        )
        yield GaugeMetricFamily(
            "mstar_tokenize_pending", "Bodies on or before the threads", found.pool.pending
        )
        yield CounterMetricFamily(
            "mstar_tokenize_refused", "Bodies refused by the full queue", found.pool.refused
        )

    def _latencies(self) -> Iterator[Metric]:
        latencies = self._service.latencies
        yield _histogram(
            "mstar_time_to_first_token_seconds", "From intake to the first token", latencies.first
        )
        yield _histogram("mstar_inter_token_seconds", "Between two tokens of a sequence", latencies.gap)
        yield _histogram("mstar_request_seconds", "Whole requests", latencies.whole)

    def _ranks(self) -> Iterator[Metric]:
        reports = self._service.statistics().reports
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"mstar_rank_{name}", text, labels=["rank"])
            for rank, report in reports.items():
                gauge.add_metric([rank], getattr(report, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"mstar_rank_{name}", text, labels=["rank"])
            for rank, report in reports.items():
                counter.add_metric([rank], getattr(report, name))
            yield counter

    def _actors(self) -> Iterator[Metric]:
        """What the board says of everybody: it is read where it lies, so an actor that hangs shows too."""
        step = GaugeMetricFamily("mstar_actor_step", "Step the actor is at", labels=["actor"])
        age = GaugeMetricFamily(
            "mstar_actor_beat_age_seconds", "Since the actor's loop last ran", labels=["actor", "stage"]
        )
        now = time.monotonic_ns()
        for actor, line in self._service.ctx.lines.items():
            step.add_metric([actor], line.step)
            if line.beat:
                age.add_metric([actor, line.stage_name], (now - line.beat) / 1e9)
        yield step
        yield age

    def _memory(self) -> Iterator[Metric]:
        service = self._service
        full = CounterMetricFamily("mstar_ring_full", "Records a full ring refused", labels=["ring"])
        for name, ring in service.ctx.outbox.items():
            full.add_metric([name], ring.statistics().refused)
        yield full
        unshared = CounterMetricFamily(
            "mstar_prompts_unshared", "Prompts whose page hashes found no room", labels=["rank"]
        )
        aborts = GaugeMetricFamily("mstar_aborts_waiting", "Aborts that wait for room", labels=["rank"])
        for rank, admission in zip(service.ranks, service.admissions, strict=True):
            found = admission.statistics()
            aborts.add_metric([rank], found.waiting_aborts)
            unshared.add_metric([rank], found.unshared)
        yield aborts
        yield unshared
        sleeper = service.ctx.statistics().sleeper
        yield CounterMetricFamily(
            "mstar_lost_wakeups", "Wake-ups that only the safety poll noticed; must stay 0", sleeper.lost
        )
        yield CounterMetricFamily(
            "mstar_safety_polls", "Safety polls of the sleeping gateway", sleeper.safety_polls
        )


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    found = histogram.statistics()
    buckets = [
        (repr(bound), float(count)) for bound, count in zip(found.bounds, found.cumulative, strict=True)
    ]
    return HistogramMetricFamily(name, text, [*buckets, ("+Inf", float(found.total))], found.sum)
