"""A manifest whose facts are not those of a conversion is refused as a proof that does not hold, and raises nothing
else."""

import json
from pathlib import Path
from typing import Any

import pytest
from halfeven.exporters.half_files.half_file import proof_folder, proof_of
from halfeven.exporters.half_files.measured import found_file, measured
from halfeven.models.errors import ParityRefused

pytestmark = pytest.mark.slow  # a conversion


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(half: Path, number: str) -> None:
    path = proof_folder(half) / "manifest.json"
    path.write_text(path.read_text().replace('"passed": true', f'"passed": true, "more": {number}'))
    with pytest.raises(ParityRefused, match=f"holds {number}, expected finite numbers"):
        proof_of(half)


@pytest.mark.parametrize("key", ["half", "reason", "forms"])
def test_a_fact_that_every_proof_has_is_needed(half: Path, key: str) -> None:
    path = proof_folder(half) / "manifest.json"
    path.write_text(
        json.dumps({other: v for other, v in json.loads(path.read_text()).items() if other != key})
    )
    with pytest.raises(ParityRefused, match=f"it has no {key}; export"):
        proof_of(half)


@pytest.mark.parametrize(
    "facts",
    [
        {"half": "fp8"}, {"reason": 3}, {"samples": "x"}, {"row_operations": []}, {"source": [1]},
        {"around": {"nodes": ["a"], "recorded": []}}, {"around": {"nodes": 3, "recorded": [], "read": []}},
    ],
)  # fmt: skip
def test_a_fact_of_another_kind_is_refused(half: Path, facts: dict[str, Any]) -> None:
    path = proof_folder(half) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    with pytest.raises(ParityRefused, match=f"does not hold: .* is damaged: its {next(iter(facts))} is "):
        proof_of(half)


def test_a_count_of_operations_that_no_release_wrote_down_is_null_and_the_half_is_proven(half: Path) -> None:
    path = proof_folder(half) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"row_operations": None}))
    assert next(measured(found_file(half)))["passed"]
