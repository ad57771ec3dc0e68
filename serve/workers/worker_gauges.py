"""What /metrics says of the other processes of a server: its HTTP workers, and starts of the engine process."""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_USER_TIME = 11  # of the fields after the name, counted from 0; the next one is the system's


class WorkerGauges(Collector):
    """``start``: how often an engine process was started. ``pids``: of the workers that are connected now."""

    def __init__(self, start: int) -> None:
        self._start = start
        self.pids: list[int] = []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("halfeven_http_workers", "HTTP workers that are connected", len(self.pids))
        yield GaugeMetricFamily("halfeven_engine_starts", "Starts of the engine process", self._start)
        memory = GaugeMetricFamily(
            "halfeven_http_worker_resident_bytes", "Resident memory of an HTTP worker", labels=("pid",)
        )
        spent = CounterMetricFamily(
            "halfeven_http_worker_cpu_seconds", "Processor time of an HTTP worker", labels=("pid",)
        )
        for pid in self.pids:
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended just now
                continue
            memory.add_metric((str(pid),), pages * _PAGE)
            ticks = int(fields[_USER_TIME]) + int(fields[_USER_TIME + 1])
            spent.add_metric((str(pid),), ticks / _TICKS)
        yield from (memory, spent)
