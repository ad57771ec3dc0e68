"""The demo shows the whole story, and the gradient scaler at work, on any processor."""

import pytest

from tests.benchmarks.slow_demo import demo

pytestmark = pytest.mark.slow


def test_the_demo_passes_and_shows_the_gradient_scaler_where_fp16_convolutions_are_slow() -> None:
    _, facts = demo(20)
    job = facts["job"]["summary"]
    assert facts["passed"] and facts["precision"] == "fp16"
    assert job["precision"] == "fp16_emulated" and job["steps"] > 100
    assert job["skipped"] > 0 and job["scale_min"] < job["scale_max"]
    assert {one["status"] for one in facts["versions"]} == {"live"}
