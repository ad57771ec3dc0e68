"""The block of a model card says which libraries its numbers come from."""

from pathlib import Path

import pytest
from halfeven.exporters.half_files import half_file
from halfeven.exporters.half_files.half_file import model_card, verify

pytestmark = pytest.mark.slow  # a conversion


def test_the_numbers_of_a_card_are_those_of_the_libraries_of_its_run(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = verify(half)
    first = next(
        row for row in model_card(half, facts).splitlines() if row.startswith("| first proven with |")
    )
    monkeypatch.setattr(half_file, "environment", lambda _: {"onnxruntime": "99.0"})
    rows = model_card(half, facts).splitlines()
    assert "| proven with | onnxruntime 99.0 |" in rows and first in rows and "99.0" not in first
