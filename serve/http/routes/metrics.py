"""The metrics that Prometheus reads at /metrics, made from the batchers' counters at the moment of reading.

Requests pay nothing for it. Triton's counters keep Triton's names, so that its dashboards work here; those that Triton
does not have (histograms of queue, compute and batch size; shares, drift, disagreement and decisions of versions in
traffic) are called ``halfeven_…``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...batching.counters import BOUNDS_NS, Counters, Phase
from ...versions.traffic.automatic_decisions import ALERTING, AutomaticDecisions
from ...versions.traffic.comparison import BOUNDS_U, Gap
from ...versions.traffic.loaded_version import LoadedVersion
from ...versions.traffic.served import ServedModel

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LABELS = ("model", "version")
_ROW_BOUNDS = tuple(2**power for power in range(11))
_TRITON_COUNTER = re.compile(rb"^((?:# (?:HELP|TYPE) )?nv_\w+)_total\b", re.MULTILINE)

_COUNTERS: tuple[tuple[str, str, Callable[[Counters], int]], ...] = (
    ("nv_inference_request_success", "Successful inference requests", lambda t: t.requests),
    ("nv_inference_count", "Rows inferred", lambda t: t.rows),
    ("nv_inference_exec_count", "Batches executed", lambda t: t.executions),
    (
        "nv_inference_request_duration_us",
        "Cumulative time of successful requests in queue and compute, microseconds",
        lambda t: (t.queue_ns + t.compute_ns) // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative time of successful requests before their batch began, microseconds",
        lambda t: t.queue_ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative time of successful requests while their batch's inputs were joined, microseconds",
        lambda t: t.assemble_ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative time of successful requests in their batch's run (copies out included), microseconds",
        lambda t: (t.compute_ns - t.assemble_ns) // 1000,
    ),
    ("nv_inference_compute_output_duration_us", "Part of compute_infer here, so always 0", lambda _: 0),
    ("halfeven_vanished_callers", "Callers that left before their batch began", lambda t: t.vanished),
    ("halfeven_rejected_requests", "Requests refused because they would wait too long", lambda t: t.rejected),
    ("halfeven_timed_out_requests", "Requests whose own timeout passed in the queue", lambda t: t.timed_out),
    ("halfeven_rescued_rows", "Rows of a half that its FP32 original answered", lambda t: t.rescued_rows),
    ("halfeven_out_of_memory", "Runs for which the device had too little memory", lambda t: t.out_of_memory),
    ("halfeven_given_up_batches", "Batches of a broken version that were not divided", lambda t: t.given_up),
)
_FAILURES: tuple[tuple[str, Callable[[Counters], int]], ...] = (
    ("REJECTED", lambda t: t.rejected + t.timed_out),  # Triton counts both so
    ("CANCELED", lambda t: t.vanished),
    ("BACKEND", lambda t: t.failures),
)
_BOUNDS_U = (*(f"{bound:g}" for bound in BOUNDS_U), "+Inf")


class BatcherCollector(Collector):
    """Reads the counters of every version once per scrape, in any thread. ``versions`` gives those loaded now.

    ``written`` gives for each model how long its answers took from outcome to socket.
    """

    def __init__(
        self,
        versions: Callable[[], Iterable[LoadedVersion]],
        written: Callable[[], Mapping[str, Phase]] = dict,
    ) -> None:
        self._versions = versions
        self._written = written

    def collect(self) -> Iterator[Metric]:
        versions = list(self._versions())
        labelled = [
            ((loaded.spec.name, one.version), one) for loaded in versions for one in loaded.all_counters()
        ]
        yield from _counters(labelled)
        yield from _histograms(labelled)
        yield _write_histogram(dict(self._written()))  # a model may be asked for the first time meanwhile
        yield from _gauges(versions)


_Labelled = list[tuple[tuple[str, str], Counters]]


def _counters(labelled: _Labelled) -> Iterator[Metric]:
    for name, text, read in _COUNTERS:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for labels, counters in labelled:
            family.add_metric(labels, read(counters))
        yield family
    failed = CounterMetricFamily(
        "nv_inference_request_failure", "Failed inference requests", labels=("model", "reason", "version")
    )
    for (model, version), counters in labelled:
        for reason, read in _FAILURES:
            failed.add_metric((model, reason, version), read(counters))
    yield failed


def _histograms(labelled: _Labelled) -> Iterator[Metric]:
    queue = HistogramMetricFamily("halfeven_queue_seconds", "A request's wait for its batch", labels=_LABELS)
    assemble = HistogramMetricFamily(
        "halfeven_assemble_seconds", "Joining a batch's inputs, a part of its run", labels=_LABELS
    )
    compute = HistogramMetricFamily("halfeven_compute_seconds", "A batch's run", labels=_LABELS)
    rows = HistogramMetricFamily("halfeven_batch_rows", "Rows per batch", labels=_LABELS)
    for labels, counters in labelled:
        queue.add_metric(labels, _by_time(counters.queue_buckets), counters.queue_ns / 1e9)
        assemble.add_metric(labels, _by_time(counters.assemble_buckets), counters.assembled_ns / 1e9)
        spent_ns = sum(spent_ns for _, spent_ns in counters.batches.values())
        compute.add_metric(labels, _by_time(counters.compute_buckets), spent_ns / 1e9)
        rows.add_metric(labels, _by_rows(counters.batches), counters.rows)
    yield from (queue, assemble, compute, rows)


def _write_histogram(written: Mapping[str, Phase]) -> Metric:
    write = HistogramMetricFamily(
        "halfeven_write_seconds", "An infer answer from its outcome to the socket", labels=("model",)
    )
    for model, phase in written.items():
        write.add_metric((model,), _by_time(phase.buckets), phase.spent_ns / 1e9)
    return write


def _by_time(counts: list[int]) -> list[tuple[str, float]]:
    """Prometheus buckets: for each upper bound in seconds, how many lie at or below it."""
    bounds = [*(f"{bound_ns / 1e9:g}" for bound_ns in BOUNDS_NS), "+Inf"]
    return list(zip(bounds, accumulate(counts), strict=True))


def _by_rows(batches: Mapping[int, tuple[int, int]]) -> list[tuple[str, float]]:
    def at_most(bound: float) -> int:
        return sum(executions for rows, (executions, _) in batches.items() if rows <= bound)

    return [*((f"{bound}", at_most(bound)) for bound in _ROW_BOUNDS), ("+Inf", at_most(float("inf")))]


def _gauges(versions: Iterable[LoadedVersion]) -> Iterator[Metric]:
    pending = GaugeMetricFamily(
        "nv_inference_pending_request_count", "Requests waiting for a batch", labels=_LABELS
    )
    active = GaugeMetricFamily(
        "halfeven_active_version", "1 for the active version", labels=(*_LABELS, "precision")
    )
    ceiling = GaugeMetricFamily(
        "halfeven_row_ceiling", "Rows in one run since the device ran out of memory", labels=_LABELS
    )
    for one in versions:
        name, prepared = one.spec.name, one.prepared
        pending.add_metric((name, prepared.version), one.waiting)
        if prepared.ceiling is not None and prepared.ceiling.known:
            ceiling.add_metric((name, prepared.version), prepared.ceiling.smallest)
        if one.label == "stable":  # a canary, a shadow or the previous version is not
            active.add_metric((name, prepared.version, prepared.precision), 1)
    yield from (pending, active, ceiling)


def new_registry(
    versions: Callable[[], Iterable[LoadedVersion]], written: Callable[[], Mapping[str, Phase]] = dict
) -> CollectorRegistry:
    """A registry of our own (two servers in one process do not meet), with the process's memory and CPU."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(BatcherCollector(versions, written))
    return registry


def metrics_text(registry: CollectorRegistry) -> bytes:
    """The body of /metrics, in Prometheus's text format (``CONTENT_TYPE``).

    The client library ends every counter in ``_total``; Triton's have no such ending.
    """
    return _TRITON_COUNTER.sub(rb"\1", generate_latest(registry))


class RolloutCollector(Collector):
    """``models`` gives those that serve now."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]], decisions: AutomaticDecisions) -> None:
        self._models = models
        self._decisions = decisions

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        yield from _shares(models)
        yield from _drift(models)
        yield from _shadow(models)
        decided = CounterMetricFamily("halfeven_decisions", "Orders and decisions", labels=("model", "kind"))
        # A series that appears with 1 does not increase: an alert would miss the only event.
        none_yet = dict.fromkeys(((one.name, kind) for one in models for kind in ALERTING), 0)
        for labels, count in (none_yet | self._decisions.counts).items():
            decided.add_metric(labels, count)
        yield decided


def _shares(models: list[ServedModel]) -> Iterator[Metric]:
    loaded_family = GaugeMetricFamily(
        "halfeven_loaded", "1 for every loaded version", labels=(*_LABELS, "label")
    )
    canary = GaugeMetricFamily("halfeven_canary_percent", "Share of the requests", labels=_LABELS)
    shadow = GaugeMetricFamily("halfeven_shadow_percent", "Share of the answers compared", labels=_LABELS)
    for served in models:
        traffic = served.traffic
        for loaded, label in traffic.loaded_versions().items():
            loaded_family.add_metric((served.name, str(loaded.number), label), 1)
        if (one := traffic.canary) is not None:  # an order may end it meanwhile
            canary.add_metric((served.name, str(one.number)), traffic.canary_percent)
        if (one := traffic.shadow) is not None:
            shadow.add_metric((served.name, str(one.number)), traffic.shadow_percent)
    yield from (loaded_family, canary, shadow)


def _drift(models: list[ServedModel]) -> Iterator[Metric]:
    labels = (*_LABELS, "output")
    gaps = HistogramMetricFamily(
        "halfeven_drift_u",
        "A live request's worst error against the FP32 original, in units of u·S",
        labels=labels,
    )
    over = CounterMetricFamily("halfeven_drift_over_limit", "Requests beyond the gate's limit", labels=labels)
    dropped = CounterMetricFamily(
        "halfeven_drift_dropped", "Checks left out: the device was busy", labels=_LABELS
    )
    for served in models:
        for loaded in served.loaded_versions():
            if (drift := loaded.drift) is None:
                continue
            for output, gap in drift.comparison.gaps().items():
                where = (served.name, str(loaded.number), output)
                _add(gaps, where, gap)
                over.add_metric(where, gap.over)
            dropped.add_metric((served.name, str(loaded.number)), drift.comparator.dropped)
    yield from (gaps, over, dropped)


def _shadow(models: list[ServedModel]) -> Iterator[Metric]:
    labels = (*_LABELS, "output")
    gaps = HistogramMetricFamily(
        "halfeven_shadow_u",
        "A shadow's worst difference from the answer given, in units of u·S",
        labels=labels,
    )
    flipped = CounterMetricFamily("halfeven_shadow_flipped", "First choices that differ", labels=labels)
    failed = CounterMetricFamily("halfeven_shadow_failed", "Requests that the shadow failed", labels=_LABELS)
    dropped = CounterMetricFamily(
        "halfeven_shadow_dropped",
        "Requests that the shadow was not asked: the device was busy",
        labels=_LABELS,
    )
    for served in models:
        if (shadow := served.shadow) is None:
            continue
        version = str(shadow.loaded.number)
        for output, gap in shadow.comparison.gaps().items():
            _add(gaps, (served.name, version, output), gap)
            flipped.add_metric((served.name, version, output), gap.flipped)
        failed.add_metric((served.name, version), shadow.comparator.failed)
        dropped.add_metric((served.name, version), shadow.comparator.dropped)
    yield from (gaps, flipped, failed, dropped)


def _add(family: HistogramMetricFamily, labels: tuple[str, ...], gap: Gap) -> None:
    family.add_metric(labels, list(zip(_BOUNDS_U, accumulate(gap.buckets), strict=True)), gap.total_u)
