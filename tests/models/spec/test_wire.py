"""Smaller datatypes on the wire: which fit, and that old specs are still read."""

import json

import pytest
from halfeven.models.errors import BadFolder
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

Y = TensorSpec("y", "FP32", (Dim(),))


def spec(wire: Wire | None, datatype: str = "FP32") -> ModelSpec:
    return ModelSpec("net", (TensorSpec("x", datatype, (Dim(), Dim(4, 4)), wire=wire),), (Y,), 8)


@pytest.mark.parametrize(
    ("wire", "model", "fits"),
    [
        ("UINT8", "FP32", True), ("INT8", "FP16", True), ("FP16", "FP32", True), ("BF16", "FP32", True),
        ("UINT16", "FP32", True), ("INT32", "INT64", True), ("UINT8", "INT32", True), ("FP32", "FP64", True),
        ("INT32", "FP32", False), ("FP32", "FP32", False), ("FP32", "BF16", False), ("INT8", "UINT64", False),
        ("FP16", "INT32", False), ("UINT8", "UINT8", False), ("BOOL", "FP32", False), ("UINT16", "FP16", False),
        ("FP16", "BF16", False), ("INT64", "FP32", False),
    ],
)  # fmt: skip
def test_a_wire_datatype_is_smaller_and_every_value_of_it_fits(wire: str, model: str, fits: bool) -> None:
    if fits:
        Wire(wire).check(model)
        return
    with pytest.raises(BadFolder, match=f"wire_datatype = '{wire}' does not fit datatype {model}: expected"):
        Wire(wire).check(model)


def test_whole_numbers_are_only_widened() -> None:
    with pytest.raises(
        BadFolder, match="wire_scale and wire_offset make fractions, and datatype INT64 has none"
    ):
        Wire("INT32", scale=0.5).check("INT64")


def test_requests_are_held_against_the_wire_datatype_and_samples_against_the_models() -> None:
    own = spec(Wire("UINT8", 0.5, -1.0))
    (wired,) = own.on_the_wire().inputs
    assert wired.fault([3, 4], "UINT8") is None and wired.fault([3, 4], "FP32") is not None
    assert own.inputs[0].fault([3, 4], "FP32") is None and own.inputs[0].fault([3, 4], "UINT8") is not None
    plain = spec(None)
    assert plain.on_the_wire() is plain


def test_a_spec_keeps_its_wire_and_one_from_before_there_were_any_is_read() -> None:
    own = spec(Wire("UINT8", 0.5, -1.0))
    assert ModelSpec.from_json(json.loads(json.dumps(own.to_json()))) == own
    old = spec(None).to_json()
    assert "wire" not in old["inputs"][0] and ModelSpec.from_json(old) == spec(None)


def test_another_meaning_of_the_numbers_on_the_wire_is_another_signature() -> None:
    plain, halved, other = spec(None), spec(Wire("UINT8", 0.5)), spec(Wire("UINT8", 0.25))
    assert len({str(one.signature()) for one in (plain, halved, other)}) == 3
    assert plain.signature() == (True, (("x", "FP32", (-1, 4)), ("y", "FP32", (-1,))))
