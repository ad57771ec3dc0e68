"""The metrics that Prometheus reads: Triton's names, true numbers, nothing paid before the scrape."""

import asyncio
import bisect
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from halfeven.models.engines.engine import Engine
from halfeven.models.errors import EngineFailed, Overloaded
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.counters import BOUNDS_NS, Counters, Phase
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.interface import PreparedVersion
from halfeven.serve.http.routes.metrics import metrics_text, new_registry

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Doubling(Engine):
    form, precision, device = "torch", "fp16", "cpu"

    def warm_up(self, parts: Any) -> None: ...

    def run(self, parts: Any) -> list[np.ndarray]:
        x = np.concatenate(parts[0])
        if (x < 0).any():
            raise ValueError("poison")
        return [x * 2]


SPEC = ModelSpec(
    "toy",
    (TensorSpec("x", "FP32", (Dim(), Dim(1, 1))),),
    (TensorSpec("y", "FP32", (Dim(), Dim(1, 1))),),
    batching=Batching(max_queue_size=4),
)
PREPARED = PreparedVersion("3", "sha", "fp16", Doubling())


@dataclass
class Loaded:
    """A loaded version as the metrics see it, with counters that a test writes."""

    counters: Counters
    spec: ModelSpec = SPEC
    prepared: PreparedVersion = field(default_factory=lambda: PREPARED)
    waiting: int = 0
    label: str = "stable"

    def all_counters(self) -> list[Counters]:
        return [self.counters.copy()]


def read(*versions: Any) -> Samples:
    """Every sample as Prometheus sees it (the client library's own parser would add ``_total`` again)."""
    text = metrics_text(new_registry(lambda: versions)).decode()
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return dict(_sample(line) for line in lines)


def _sample(line: str) -> tuple[tuple[str, frozenset[tuple[str, str]]], float]:
    name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups("")  # pyright: ignore
    return (name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))), float(value)


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset({"model": "toy", "version": "3", **labels}.items())]


def column(value: float) -> list[np.ndarray]:
    return [np.full((1, 1), value, np.float32)]


async def _a_busy_minute(device: DeviceThread, batcher: Batcher) -> Samples:
    """Two batches of two, one poisonous request, one refused, one vanished; then two that wait."""
    for _ in range(2):
        await asyncio.gather(batcher.submit(column(1), 1), batcher.submit(column(2), 1))
    with pytest.raises(EngineFailed):
        await batcher.submit(column(-1), 1)
    device.hold()
    futures = [batcher.submit(column(i), 1) for i in range(4)]
    with pytest.raises(Overloaded):
        batcher.submit(column(9), 1)
    futures[0].cancel()
    for _ in range(2):
        await asyncio.wrap_future(device.call(lambda: None))
    samples = read(Loaded(batcher.all_counters()[0], waiting=batcher.waiting))
    device.release()
    await batcher.drain()
    return samples


def test_a_served_minute_is_told_under_tritons_names() -> None:
    device = DeviceThread()
    device.start()
    batcher = Batcher(SPEC, device, PREPARED)
    samples = asyncio.run(_a_busy_minute(device, batcher))
    assert device.stop(30)
    assert value(samples, "nv_inference_request_success") == 4
    assert value(samples, "nv_inference_count") == 4
    assert value(samples, "nv_inference_exec_count") == 2
    assert value(samples, "nv_inference_request_failure", reason="BACKEND") == 1
    assert value(samples, "nv_inference_request_failure", reason="REJECTED") == 1
    assert value(samples, "nv_inference_request_failure", reason="CANCELED") == 1
    assert value(samples, "nv_inference_pending_request_count") == 3
    assert value(samples, "halfeven_rejected_requests_total") == 1
    assert value(samples, "halfeven_vanished_callers_total") == 1
    assert value(samples, "halfeven_active_version", precision="fp16") == 1
    assert value(samples, "halfeven_batch_rows_bucket", le="1") == 0
    assert value(samples, "halfeven_batch_rows_bucket", le="2") == 2
    assert value(samples, "halfeven_batch_rows_sum") == 4


def test_times_are_summed_over_requests_in_microseconds_and_sorted_into_buckets() -> None:
    counters = Counters("3")
    counters.executed([9_000_000, 2_000_000, 40_000], rows=5, compute_ns=6_000_000, assemble_ns=1_000_000)
    counters.executed([30_000], rows=1, compute_ns=2_000_000)
    samples = read(Loaded(counters))
    assert value(samples, "nv_inference_queue_duration_us") == 11_070
    assert value(samples, "nv_inference_compute_input_duration_us") == 3_000
    assert value(samples, "nv_inference_compute_infer_duration_us") == 17_000
    assert value(samples, "halfeven_assemble_seconds_sum") == pytest.approx(0.001)
    assert value(samples, "halfeven_assemble_seconds_count") == 2
    assert value(samples, "nv_inference_request_duration_us") == 31_070
    assert value(samples, "halfeven_queue_seconds_bucket", le="5e-05") == 2
    assert value(samples, "halfeven_queue_seconds_bucket", le="0.0025") == 3
    assert value(samples, "halfeven_queue_seconds_bucket", le="+Inf") == 4
    assert value(samples, "halfeven_queue_seconds_sum") == pytest.approx(0.01107)
    assert value(samples, "halfeven_compute_seconds_count") == 2
    assert value(samples, "halfeven_compute_seconds_bucket", le="0.0025") == 1
    assert value(samples, "halfeven_compute_seconds_sum") == pytest.approx(0.008)


def test_waits_are_sorted_into_buckets_as_one_by_one() -> None:
    random = np.random.default_rng()
    counters, expected = Counters("3"), [0] * (len(BOUNDS_NS) + 1)
    for _ in range(50):
        waits_ns = sorted(
            (int(10 ** random.uniform(2, 11)) for _ in range(random.integers(1, 5))), reverse=True
        )
        counters.executed(waits_ns, len(waits_ns), 1)
        for wait_ns in waits_ns:
            expected[bisect.bisect_left(BOUNDS_NS, wait_ns)] += 1
    assert counters.copy().queue_buckets == expected


def test_every_reading_has_all_that_was_noted_before_it_and_nothing_twice() -> None:
    counters, batches = Counters("3"), 5_000
    writer = threading.Thread(target=lambda: [counters.executed([7, 9], 3, 11, 2) for _ in range(batches)])
    writer.start()
    while writer.is_alive():
        now = counters.copy()
        assert (now.requests, now.rows) == (2 * now.executions, 3 * now.executions)
        assert now.compute_ns == 22 * now.executions == 22 * sum(now.compute_buckets)
        assert sum(now.queue_buckets) == now.requests and now.batches in (
            {},
            {3: (now.executions, 11 * now.executions)},
        )
    assert counters.copy().executions == counters.copy().executions == batches


def test_only_names_lose_the_ending_that_triton_does_not_have() -> None:
    named: Any = Loaded(Counters("3"), spec=ModelSpec("nv_x_total", SPEC.inputs, SPEC.outputs))
    text = metrics_text(new_registry(lambda: [named])).decode()
    assert "# TYPE nv_inference_count counter\n" in text
    assert 'nv_inference_count{model="nv_x_total",version="3"} 0.0\n' in text
    assert "halfeven_vanished_callers_total{" in text


def test_two_servers_in_one_process_do_not_meet() -> None:
    one, two = Counters("3"), Counters("3")
    one.executed([1], rows=1, compute_ns=1)
    assert value(read(Loaded(one)), "nv_inference_count") == 1
    assert value(read(Loaded(two)), "nv_inference_count") == 0


def test_every_version_that_was_active_keeps_its_own_counters() -> None:
    @dataclass
    class Two(Loaded):
        def all_counters(self) -> list[Counters]:
            return [Counters("2", requests=5), Counters("3", requests=7)]

    samples = read(Two(Counters("3")))
    assert value(samples, "nv_inference_request_success", version="2") == 5
    assert value(samples, "nv_inference_request_success") == 7


def test_writing_is_a_phase_of_its_own() -> None:
    phase = Phase()
    phase.add(30_000)
    phase.add(3_000_000)
    text = metrics_text(new_registry(list, lambda: {"toy": phase})).decode()
    assert 'halfeven_write_seconds_bucket{le="5e-05",model="toy"} 1.0' in text
    assert 'halfeven_write_seconds_count{model="toy"} 2.0' in text
    assert 'halfeven_write_seconds_sum{model="toy"} 0.00303' in text


def test_what_went_wrong_and_was_mended_is_counted() -> None:
    counters = Counters("3")
    counters.rescued(2)
    counters.ran_out(1, 8)
    counters.gave_up()
    samples = read(Loaded(counters))
    assert value(samples, "halfeven_rescued_rows_total") == 2
    assert value(samples, "halfeven_out_of_memory_total") == 1
    assert value(samples, "halfeven_given_up_batches_total") == 1
