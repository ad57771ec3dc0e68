"""The wishes of a caller beside its tensors."""

from dataclasses import astuple
from typing import Any

import pytest
from halfeven.models.errors import BadRequest
from halfeven.serve.batching.interface import NO_TERMS
from halfeven.serve.http.codecs.infer_parameters import read_wishes


def wishes(id: str | None = None, **parameters: Any) -> Any:
    return read_wishes({"parameters": parameters}, id)


def test_who_asks_for_nothing_has_no_terms_of_his_own() -> None:
    for message in (
        {},
        {"parameters": None},
        {"parameters": {}},
        {"parameters": {"binary_data_output": True}},
    ):
        assert read_wishes(message, None).terms is NO_TERMS
    assert wishes(priority=0, timeout=0, deterministic=False, mine="x").terms is NO_TERMS


def test_priority_timeout_and_determinism_become_terms_with_the_id_as_key() -> None:
    terms = wishes("me", priority=1, timeout=1500, deterministic=True).terms
    assert astuple(terms) == (1, 1_500_000, True, "me")
    assert astuple(read_wishes({}, "me").terms) == (0, 0, False, "me")


def test_a_timeout_may_be_written_as_text() -> None:
    assert wishes(timeout="2000000").terms.timeout_ns == 2_000_000_000


def test_a_timeout_of_all_64_bits_is_held_in_a_signed_clock() -> None:
    assert 2**61 < wishes(timeout=2**64 - 1).terms.timeout_ns < 2**63


@pytest.mark.parametrize("key", ["priority", "timeout"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "soon", "-1", "٣", "", "9" * 21, 2**64])
def test_a_number_that_is_none_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"Unable to parse '{key}': expected a whole number"):
        wishes(None, **{key: value})


def test_priorities_end_at_31_bits() -> None:
    assert wishes(priority=2**31).terms.priority == 2**31
    with pytest.raises(BadRequest, match="'priority'"):
        wishes(priority=2**31 + 1)


def test_determinism_is_true_or_false() -> None:
    with pytest.raises(BadRequest, match="Unable to parse 'deterministic': expected true or false, got '1'"):
        wishes(deterministic=1)


def test_nan_may_be_asked_as_null_or_as_text() -> None:
    assert [wishes(nan_as=word).nan_as for word in ("token", "null", "string")] == ["token", "null", "string"]
    for bad in ("nan", None, 1):
        with pytest.raises(BadRequest, match="Unable to parse 'nan_as': expected one of"):
            wishes(nan_as=bad)


def test_keys_that_nobody_knows_are_a_caller_s_own_and_reserved_ones_are_refused() -> None:
    assert wishes(headers_of_mine="a", temperature=0.5, nothing=None).terms is NO_TERMS
    for key in ("triton_x", "sequence_id"):
        with pytest.raises(BadRequest, match=f"parameter '{key}'"):
            wishes(None, **{key: 1})
