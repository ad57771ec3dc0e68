"""Figures as the pages show them: lines, durations, badges, answers."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.interface import Answer, PreparedVersion
from halfeven.serve.dashboard.facts import (
    HEIGHT,
    WIDTH,
    answer_facts,
    badge,
    duration,
    phrase,
    sparkline,
    timeline,
)
from halfeven.serve.versions.traffic.recent import BINS, Bin

from tests.serve.conftest import FakeEngine
from tests.serve.dashboard.conftest import busy
from tests.specs import tensor


def test_the_lines_of_p50_and_p99_lie_in_their_box_the_newest_at_the_right(
    random: np.random.Generator,
) -> None:
    bins = [busy(int(index)) if random.random() < 0.7 else Bin() for index in range(BINS)]
    bins[-1] = busy(3)
    spark = sparkline(bins)
    assert spark is not None
    points = [
        [tuple(map(float, found)) for found in re.findall(r"[ML]([\d.]+) ([\d.-]+)", spark[name])]
        for name in ("p50", "p99")
    ]
    assert len(points[0]) == len(points[1]) == sum(one.answered > 0 for one in bins)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in points for x, y in line)
    assert all(slow[1] <= usual[1] for usual, slow in zip(*points, strict=True)), "p99 is never below p50"
    assert points[0][-1][0] == WIDTH
    assert sparkline([]) is sparkline([Bin()] * BINS) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (93_784, "1 d 2 h"), (86_400, "1 d 0 h")]
)
def test_a_duration_has_its_two_largest_parts(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_card_has_the_first_part_of_a_reason() -> None:
    assert (
        phrase("measured fastest here at batch 32: torch 1 ms, onnx 2 ms")
        == "measured fastest here at batch 32"
    )
    assert phrase("the half is proven; its FP32 original stands by") == "the half is proven"
    assert len(phrase("x" * 500)) == 90


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"status": "refused", "half": "fp16"}, ("bad", "refused")),
        ({"status": "refused", "forms": {"torch": {"passed": False}}}, ("bad", "refused")),
        ({"status": "refused", "forms": {"torch": {"passed": True}}}, ("bad", "equal, but refused")),
        ({"status": "damaged"}, ("bad", "damaged")),
        ({"status": "live", "half": None}, ("", "FP32")),
        ({"status": "live", "half": "fp16", "samples": {"source": "given"}}, ("good", "equal")),
        (
            {"status": "live", "half": "bf16", "samples": {"source": "generated"}},
            ("amber", "equal, on generated samples"),
        ),
    ],
)
def test_the_badge_of_a_version(facts: dict, expected: tuple[str, str]) -> None:
    assert badge(facts) == expected


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("failed", "METRIC_REGRESSED", "fine-tuning refused: why"),
        ("failed", "OUT_OF_MEMORY", "fine-tuning failed: why"),
        ("succeeded", None, "fine-tuning succeeded: why"),
    ],
)
def test_a_job_whose_version_was_refused_did_not_fail(status: str, code: str | None, expected: str) -> None:
    behind: Any = SimpleNamespace(director=SimpleNamespace(newest_events=lambda names, most: []))
    job: Any = SimpleNamespace(
        name="net",
        status=status,
        code=code,
        message="/srv/store/why",
        id="ftjob-1",
        finished_at=1,
        created_at=0,
    )
    assert [one["message"] for one in timeline(behind, ["net"], [job], 9)] == [expected]


def test_an_answer_is_shown_by_what_its_outputs_are() -> None:
    labels = tuple("abcdefg")
    outputs = (
        tensor("scores", "FP16", -1, 7, kind="logits", labels=labels),
        tensor("index", "INT64", -1),
        tensor("many", "FP32", -1, 10, 10),
        tensor("shot", "FP32", -1, 1, 4, 4, kind="image"),
    )
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 1),), outputs, 8)
    scores = np.array([[1, np.nan, 3, 0, -1, 9, 2]], np.float16)
    arrays = [
        scores,
        np.array([2**53 + 1]),
        np.zeros((1, 10, 10), np.float32),
        np.zeros((1, 1, 4, 4), np.float32),
    ]
    prepared = PreparedVersion("3", "0" * 64, "fp16", FakeEngine())
    shown = answer_facts(spec, Answer(arrays, prepared, 1_500_000, 0, 1, rescued=1))
    best, index, many, shot = shown["outputs"]
    assert [label for label, _ in best["best"]] == ["f", "c", "g", "a", "d"]
    assert index["numbers"] == "9007199254740993" and (many["more"], many["shape"]) == (36, [10, 10])
    assert shot["picture"].startswith("iVBOR") and shown["precision"] == "fp32-rescued"
