"""JSON numbers are converted piece by piece."""

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.datatypes import DATATYPES
from halfeven.serve.http.codecs import json_numbers
from halfeven.serve.http.codecs.json_numbers import array_of


@pytest.mark.parametrize("datatype", DATATYPES)
def test_many_numbers_are_converted_piece_by_piece_to_what_they_are_at_once(
    datatype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion of a piece keeps the interpreter's lock until its end."""
    kind, converted = DATATYPES[datatype], list[int]()
    data = np.random.default_rng().integers(0, 2, (5, 7)).astype(kind.numpy).tolist()
    at_once = array_of(data, kind, "data")

    def pack(form: str, *numbers: Any) -> bytes:
        converted.append(len(numbers))
        return struct.pack(form, *numbers)

    monkeypatch.setattr(json_numbers, "PIECE", 8)
    monkeypatch.setattr(json_numbers, "struct", SimpleNamespace(pack=pack, error=struct.error))
    in_pieces = array_of(data, kind, "data")
    assert in_pieces.dtype == at_once.dtype and in_pieces.tolist() == at_once.tolist() == data
    assert converted == ([] if datatype == "BOOL" else [8, 8, 8, 8, 3])
    data[4][2] = "odd"
    with pytest.raises(BadRequest, match=r"data\[4\]\[2\]: expected .* got \"odd\""):
        array_of(data, kind, "data")
