"""The terminal's table of a tuning: each way in a line of 80 columns, and why the winner won."""

from typing import Any

import pytest
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.serve.tuning.search import MeasuredWay, choose
from halfeven.serve.tuning.shown import described
from halfeven.serve.versions.loading.tuned import Way, Winner
from rich.console import Console


def way(form: str, precision: str, threads: int, rate: float) -> MeasuredWay:
    rows = {1 << power: 2.0 / rate * (1 << power) / (2 if power == 10 else 1) for power in range(11)}
    return MeasuredWay(Way(form, precision, CpuSetup(threads, frozenset({"fold"}))), rows)


def shown(measured: list[MeasuredWay]) -> str:
    best = choose(measured)
    winner: dict[str, Any] = {
        "form": best.way.form,
        "precision": best.way.precision,
        "threads": best.way.threads,
        "useful_rows": best.useful_rows,
        "queue_delay_us": 0,
        "rows_per_second": best.rows_per_second,
    }
    assert Winner(**winner)
    rows = [
        {
            "form": one.way.form,
            "precision": one.way.precision,
            **one.way.setup.to_json(),
            "rows": size,
            "seconds": seconds,
        }
        for one in measured
        for size, seconds in one.seconds.items()
    ]
    facts = {"model": "net", "version": 1, "measurements": rows, "simulations": [], "winner": winner}
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(described(facts))
        return console.export_text()


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (
            [way("torch", "fp32", 1, 1e6), way("onnx", "fp16", 1, 9e5)],
            "a half must have 1.1 times the rows per second of the fastest FP32, and onnx fp16, 1 thread, fold has "
            "0.90 times those of torch fp32",
        ),
        ([way("torch", "fp32", 1, 1e6), way("onnx", "fp16", 1, 2e6)], "has 2.00 times those of torch fp32"),
        ([way("torch", "fp32", 1, 1e6)], "no half is proven here"),
        (
            [way("torch", "fp32", 1, 1e6), way("torch", "fp32", 2, 1.05e6)],
            "2 threads gain 1.05 times, and must gain 1.1",
        ),
    ],
)
def test_each_way_has_a_line_and_the_winner_a_reason(measured: list[MeasuredWay], words: str) -> None:
    text = shown(measured)
    assert words in " ".join(text.split())
    for one in measured:
        assert any(
            str(one.way) in line and f"{one.rows_per_second:,.0f}" in line for line in text.splitlines()
        )
