"""The load of the server: the gauges that an autoscaler reads, and the header of an answer for a load balancer.

The header is that of ORCA (Open Request Cost Aggregation) as Envoy and gRPC read it: a request with
``endpoint-load-metrics-format: TEXT`` or ``JSON`` gets ``endpoint-load-metrics``. Source: Envoy, "ORCA load reports",
xDS ``OrcaLoadReport``.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import orjson
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..versions.traffic.loaded_version import LoadedVersion
from .limits.bounds import ServerBounds
from .limits.memory_budget import usable_memory

_LABELS = ("model", "version")
WINDOW_NS = 10_000_000_000
_STEP_NS = 1_000_000_000  # between two looks; a read in between gives the last value


class ServerLoad:
    """``versions`` gives those that are loaded now."""

    def __init__(self, versions: Callable[[], Iterable[LoadedVersion]]) -> None:
        self.versions = versions
        self._utilisation = Utilisation(self._busy_ns)

    @property
    def utilisation(self) -> float:
        return self._utilisation.share()

    def report(self, model: str) -> tuple[float, dict[str, float]]:
        """The share of the time in which batches ran, and by name the requests that wait for this model and the seconds
        that a new one would wait."""
        own = [one for one in self.versions() if one.name == model]
        return round(self.utilisation, 4), {
            "queue_requests": sum(one.waiting for one in own),
            "queue_seconds": round(max((one.expected_wait_s for one in own), default=0.0), 6),
        }

    def header(self, form: str, model: str) -> bytes | None:
        """The value of ``endpoint-load-metrics`` for an answer of this model; None for a format that is not known."""
        utilisation, named = self.report(model)
        if form.upper() == "JSON":
            return b"JSON " + orjson.dumps({"application_utilization": utilisation, "named_metrics": named})
        if form.upper() == "TEXT":
            pairs = [f"named_metrics.{name}={value}" for name, value in named.items()]
            return ("TEXT " + ",".join([f"application_utilization={utilisation}", *pairs])).encode()
        return None

    def _busy_ns(self) -> int:
        counters = (one for version in self.versions() for one in version.all_counters())
        return sum(spent_ns for one in counters for _, spent_ns in one.batches.values())


class LoadCollector(Collector):
    """The gauges at /metrics. ``ready``: as at /v2/health/ready; ``jobs``: fine-tuning jobs by their status."""

    def __init__(
        self,
        load: ServerLoad,
        bounds: ServerBounds,
        ready: Callable[[], bool],
        jobs: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._load, self._bounds, self._ready, self._jobs = load, bounds, ready, jobs

    def collect(self) -> Iterator[Metric]:
        wait = GaugeMetricFamily(
            "halfeven_expected_wait_seconds", "What a new request would wait for its batch", labels=_LABELS
        )
        for one in self._load.versions():
            wait.add_metric((one.name, str(one.number)), one.expected_wait_s)
        jobs = GaugeMetricFamily("halfeven_jobs", "Fine-tuning jobs by status", labels=("status",))
        for status, count in self._jobs().items():
            jobs.add_metric((status,), count)
        yield from (wait, jobs)
        budget, connections = self._bounds.budget, self._bounds.connections
        for name, text, value in (
            ("ready", "1 where the server is ready", float(self._ready())),
            ("device_utilisation", "Share of the last ten seconds in which batches ran", self._load.utilisation),
            ("request_memory_bytes", "Memory that requests hold", budget.used),
            ("request_memory_limit_bytes", "Memory that requests may hold", budget.limit),
            ("memory_limit_bytes", "Memory that the process may have (machine, control group)", usable_memory()),
            ("open_connections", "Open HTTP connections", len(connections)),
            ("connection_limit", "HTTP connections that may be open", connections.limit),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"halfeven_{name}", text, value)


class Utilisation:
    """The share of the time in which batches ran: computed when it is read, nothing is paid per batch.

    ``busy_ns`` gives the time that batches took so far; ``clock`` gives nanoseconds. For one thread.

    A version that is unloaded takes its time out of the sum: the share of that moment is too low, never below 0.
    Several batches that compute at once count each, up to 1.
    """

    def __init__(self, busy_ns: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._busy_ns, self._clock = busy_ns, clock
        self._looks = deque([(clock(), busy_ns())])  # (when, how long batches had run)
        self._share = 0.0

    def share(self) -> float:
        """The share of time that is busy, from 0 to 1, over the last `WINDOW_NS`; over the time since the last read
        where that is longer."""
        now_ns = self._clock()
        if now_ns - self._looks[-1][0] < _STEP_NS:
            return self._share
        self._looks.append((now_ns, self._busy_ns()))
        while len(self._looks) > 2 and now_ns - self._looks[1][0] >= WINDOW_NS:
            self._looks.popleft()
        (since_ns, before_ns), (_, busy_ns) = self._looks[0], self._looks[-1]
        self._share = min(max((busy_ns - before_ns) / (now_ns - since_ns), 0.0), 1.0)
        return self._share
