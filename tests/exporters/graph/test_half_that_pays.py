"""A half is made where it saves bytes of constants, or more bytes per run than its casts move."""

from dataclasses import dataclass

import pytest
from halfeven.exporters.graph.traffic import SMALL, Traffic, why_not_half


@dataclass(frozen=True)
class Half:
    bytes: int
    bytes_fp32: int = 10 * SMALL
    nodes: int = 8
    half_nodes: int = 4


def saving() -> Traffic:
    return Traffic((), 0, saved=1000)


@pytest.mark.parametrize("share", [0.5, 0.98, 1.0, 1.009])
def test_a_half_with_about_as_many_bytes_is_made_where_it_pays_per_run(share: float) -> None:
    assert why_not_half(Half(int(share * 10 * SMALL)), saving) == ""


def test_a_half_with_more_bytes_than_fp32_is_not_made_whatever_it_saves_per_run() -> None:
    """Layers that share their weights, half of them in FP32: each weight would be there twice."""
    why = why_not_half(Half(15 * SMALL), saving)
    assert f"{15 * SMALL} bytes of constants, more than the {10 * SMALL} of FP32" in why
