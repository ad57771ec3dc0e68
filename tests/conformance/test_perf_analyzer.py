"""The real perf_analyzer against our server (docs/conformance.md says where the binary comes from)."""

from dataclasses import replace

import pytest

from tests.conformance.conftest import Serving
from tests.conformance.perf_analyzer import BINARY, Measured, measure, read

needs_the_binary = pytest.mark.skipif(not BINARY, reason="HALFEVEN_PERF_ANALYZER names no perf_analyzer")
# Stable to within 60 %: it is the counting that is looked at here, on a machine that does other things too.
SHORT = ["--measurement-mode", "count_windows", "--measurement-request-count", "1000", "-s", "60"]


@needs_the_binary
@pytest.mark.parametrize("rows", [1, 4])
def test_client_and_server_count_the_same(serving: Serving, rows: int) -> None:
    options = [*SHORT, "-b", str(rows), "--concurrency-range", "1:8:7"]
    measured = read(measure(serving.address, "simple", options))
    assert [item.concurrency for item in measured] == [1, 8]
    for item in measured:
        assert item.disagreements(rows) == []


@needs_the_binary
def test_requests_at_once_share_executions(serving: Serving) -> None:
    (item,) = read(measure(serving.address, "simple", [*SHORT, "--concurrency-range", "8"]))
    assert item.executions < item.inferences


@needs_the_binary
@pytest.mark.parametrize("form", ["json", "binary"])
def test_free_dimensions_and_both_forms_of_tensors(serving: Serving, form: str) -> None:
    forms = ["--input-tensor-format", form, "--output-tensor-format", form]
    options = [*SHORT, "--shape", "INPUT0:5", *forms, "--concurrency-range", "2"]
    (item,) = read(measure(serving.address, "onnx_zero_1_float32", options))
    assert item.disagreements() == []


PRINTED = """
Request concurrency: 8
  Client: 
    Request count: 8171
    Throughput: 2704.36 infer/sec
    Avg latency: 2952 usec (standard deviation 2186 usec)
    p50 latency: 2306 usec
    Avg HTTP time: 2946 usec (send/recv 35 usec + response wait 2911 usec)
  Server: 
    Inference count: 8179
    Execution count: 1595
    Successful request count: 8179
    Avg request latency: 691 usec (overhead 0 usec + queue 573 usec + compute input 0 usec + compute infer 118 usec + compute output 0 usec)

Inferences/Second vs. Client Average Batch Latency
Concurrency: 8, throughput: 2704.36 infer/sec, latency 2952 usec
"""  # noqa: E501, W291 (as it printed it)
READ = Measured(8, 8171, 2952, 2704.36, 8179, 1595, 8179, 691, (0, 573, 0, 118, 0))


def test_what_it_prints_is_read() -> None:
    assert read(PRINTED) == [READ]
    assert READ.disagreements() == []


def test_what_it_does_not_print_is_missed() -> None:
    with pytest.raises(ValueError, match="no breakdown"):
        read(PRINTED.replace("Avg request latency", "Avg latency"))


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"client_requests": 8500}, "clients had 8500 answers"),
        ({"inferences": 8180}, "are not 8180 rows"),
        ({"executions": 0}, "0 executions"),
        ({"client_us": 690}, "that clients waited"),
        ({"server_parts_us": (0, 573, 0, 18, 0)}, "do not sum"),
    ],
)
def test_sides_that_cannot_both_be_right_are_noticed(lie: dict[str, int], words: str) -> None:
    (fault,) = replace(READ, **lie).disagreements()  # type: ignore[arg-type]
    assert words in fault
