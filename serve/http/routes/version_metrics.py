"""Prometheus families of versions and traffic: shares, drift, disagreement, decisions. Read once per scrape."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...versions.traffic.automatic_decisions import AutomaticDecisions
from ...versions.traffic.comparison import BOUNDS_U, Gap
from ...versions.traffic.served import ServedModel

_LABELS = ("model", "version")
_BOUNDS = (*(f"{bound:g}" for bound in BOUNDS_U), "+Inf")


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
        for labels, count in list(self._decisions.counts.items()):
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
            dropped.add_metric((served.name, str(loaded.number)), drift.dropped)
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
        failed.add_metric((served.name, version), shadow.failed)
        dropped.add_metric((served.name, version), shadow.dropped)
    yield from (gaps, flipped, failed, dropped)


def _add(family: HistogramMetricFamily, labels: tuple[str, ...], gap: Gap) -> None:
    family.add_metric(labels, list(zip(_BOUNDS, accumulate(gap.buckets), strict=True)), gap.total_u)
