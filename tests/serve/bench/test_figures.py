"""Known latencies give known figures: percentiles are exact, and what was not measured is not made up."""

from array import array
from typing import Any

import numpy as np
import pytest
from halfeven.serve.bench.figures import Cpu, figures, percentile, spread_ms
from halfeven.serve.bench.record import MOST_TIMINGS, Record

HEAD = (
    b"http/1.1 200 ok\r\nhalfeven-version: 3\r\nhalfeven-precision: fp16\r\n"
    b"server-timing: queue;dur=1.500, compute;dur=2.250\r\ncontent-length: 0"
)
IDLE = Cpu(0.1, 1.0)


def window() -> Record:
    return Record(begin=100.0, end=110.0)


def said(requests: int, queue_ns: int, compute_ns: int, batches: int) -> dict[str, Any]:
    phases = {
        "queue": {"count": requests, "ns": queue_ns},
        "compute_infer": {"count": requests, "ns": compute_ns},
        "fail": {"count": 0, "ns": 0},
    }
    counts = {"inference_count": 2 * requests, "execution_count": batches, "inference_stats": phases}
    return {"model_stats": [counts]}


@pytest.mark.parametrize(
    ("percent", "expected"), [(0.1, 1), (50, 500), (90, 900), (99, 990), (99.9, 999), (100, 1000)]
)
def test_a_percentile_is_the_value_that_so_many_do_not_exceed(percent: float, expected: int) -> None:
    assert percentile(range(1, 1001), percent) == expected


def test_the_percentiles_of_a_few_are_among_them() -> None:
    spread = spread_ms([0.003, 0.001, 0.002])
    assert spread is not None
    assert spread == pytest.approx(
        {"p50": 2.0, "p90": 3.0, "p99": 3.0, "p99.9": 3.0, "max": 3.0, "mean": 2.0}
    )
    assert spread_ms([]) is None


def test_latency_counts_from_the_schedule_and_only_what_was_due_in_the_window_counts() -> None:
    record = window()
    for scheduled, took in ((99.9, 5.0), (100.0, 0.25), (105.0, 0.75), (109.9, 2.0), (110.0, 0.5)):
        record.was_sent(scheduled)
        record.answered(scheduled, scheduled + took - 0.1, scheduled + took, 200, HEAD, b"")
    found = figures(record, IDLE, {}, {}, rows=4)
    assert (found["sent"], found["ok"]) == (3, 3)
    assert found["latency_ms"]["max"] == pytest.approx(2000)
    assert found["latency_ms"]["p50"] == pytest.approx(750)
    # 104.9, 100.25 and 105.75 came within the window, 111.9 and 110.5 after it
    assert found["per_second"] == pytest.approx(0.3)
    assert found["rows_per_second"] == pytest.approx(1.2)


def test_refusals_and_failures_have_their_own_figures() -> None:
    record = window()
    record.answered(101.0, 101.0, 101.5, 200, HEAD, b"")
    for took in (0.001, 0.003):
        record.answered(
            102.0, 104.0, 104.0 + took, 503, b"http/1.1 503\r\nretry-after: 2", b'{"error":"full"}'
        )
    record.failed(103.0, "timeout")
    found = figures(record, IDLE, {}, {}, rows=1)
    assert found["statuses"] == {"200": 1, "503": 2, "timeout": 1}
    assert found["latency_ms"]["max"] == pytest.approx(500)
    assert found["refused"]["count"] == 2
    assert found["refused"]["from_sent_ms"]["max"] == pytest.approx(3.0)
    assert found["refused"]["latency_ms"]["max"] == pytest.approx(2003)
    assert found["refused"]["retry_after"] == {"2": 2}
    assert found["messages"] == {"503": '{"error":"full"}'}


def test_the_servers_own_split_comes_from_its_header_and_from_the_growth_of_its_counters() -> None:
    record = window()
    record.answered(101.0, 101.0, 101.5, 200, HEAD, b"")
    found = figures(record, IDLE, said(10, 1_000, 50_000, 5), said(30, 41_000_000, 20_050_000, 15), rows=2)
    assert found["server_timing_ms"]["queue"]["p50"] == pytest.approx(1.5)
    assert found["server_timing_ms"]["compute"]["p99"] == pytest.approx(2.25)
    assert found["answered_by"] == [{"version": "3", "precision": "fp16", "count": 1}]
    assert found["statistics"] == {
        "requests": 20,
        "rows": 40,
        "batches": 10,
        "rows_per_batch": 4.0,
        "queue_ms": pytest.approx(2.04995),
        "compute_ms": pytest.approx(1.0),
        "failures": 0,
    }


def test_a_server_without_headers_or_counters_is_not_credited_with_any() -> None:
    record = window()
    record.answered(101.0, 101.0, 101.5, 200, b"http/1.1 200 ok", b"")
    found = figures(record, IDLE, said(1, 1, 1, 1), {}, rows=1)
    assert found["statistics"] is None
    assert found["server_timing_ms"] == {}
    assert found["answered_by"] == [{"version": "", "precision": "", "count": 1}]


@pytest.mark.slow
def test_with_very_many_answers_every_second_timing_is_kept_from_beginning_to_end() -> None:
    record = window()
    count = 2 * MOST_TIMINGS
    for number in range(count):
        head = b"http/1.1 200 ok\r\nserver-timing: queue;dur=%d" % number
        record.answered(101.0, 101.0, 101.5, 200, head, b"")
    assert MOST_TIMINGS / 2 <= len(record.timings) <= MOST_TIMINGS
    timing = figures(record, IDLE, {}, {}, rows=1)["server_timing_ms"]["queue"]
    assert timing["p50"] == pytest.approx(count / 2, rel=0.01)
    assert timing["p90"] == pytest.approx(count * 0.9, rel=0.01)


@pytest.mark.parametrize(("used_s", "limited"), [(9.1, True), (8.9, False)])
def test_a_generator_with_no_core_left_says_that_it_was_the_limit(used_s: float, limited: bool) -> None:
    record = window()
    for _ in range(2000):
        record.was_sent(101.0)
    found = figures(record, Cpu(used_s, 10.0), {}, {}, rows=1)["generator"]
    assert found["was_limit"] is limited
    assert any("it was the limit" in doubt for doubt in found["doubts"]) is limited
    assert found["cpu_s_per_1000"] == pytest.approx(used_s / 2)


@pytest.mark.parametrize(("waited_s", "doubted"), [(1.5, True), (0.5, False)])
def test_a_generator_that_waited_for_a_core_says_so(waited_s: float, doubted: bool) -> None:
    found = figures(window(), Cpu(1.0, 10.0, waited_s), {}, {}, rows=1)["generator"]
    assert found["waited_share"] == pytest.approx(waited_s / 10)
    assert any("waited for a core" in doubt for doubt in found["doubts"]) is doubted
    assert not found["was_limit"]


@pytest.mark.parametrize(("late_s", "doubted"), [(0.02, True), (0.0005, False)])
def test_arrivals_that_the_generator_missed_are_told(late_s: float, doubted: bool) -> None:
    record = window()
    record.answered(101.0, 101.0, 101.001, 200, HEAD, b"")
    record.was_late(101.0, 101.0 + late_s)
    found = figures(record, IDLE, {}, {}, rows=1)["generator"]
    assert any("late or more" in doubt for doubt in found["doubts"]) is doubted
    assert found["late_ms"]["max"] == pytest.approx(late_s * 1e3)


def test_the_timeline_shows_when_it_was_slow() -> None:
    record = window()
    due = np.arange(100.05, 110, 0.1)
    record.due[200] = array("d", due)
    record.latencies[200] = array("d", np.where((due > 104) & (due < 105), 0.5, 0.01))
    line = figures(record, IDLE, {}, {}, rows=1)["timeline"]
    slow = [at["at_s"] for at in line if at["p99"] > 100]
    assert sum(at["count"] for at in line) == len(due)
    assert slow
    assert 3.8 < min(slow) <= max(slow) < 5.2
