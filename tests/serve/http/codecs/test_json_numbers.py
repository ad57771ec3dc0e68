"""JSON as an order has it: how deep it may be, and the numbers that stand beside a NaN."""

import orjson
import pytest
from halfeven.models.errors import BadRequest
from halfeven.serve.http.codecs.json_numbers import MAX_DEPTH, parse


def nested(levels: int, opening: str, closing: str) -> bytes:
    return (opening * levels + "1" + closing * levels).encode()


@pytest.mark.parametrize("beside", [b"1", b"NaN"])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_an_order_may_have_100_levels_and_no_more(brackets: tuple[str, str], beside: bytes) -> None:
    at_most = b"[%b,%b]" % (beside, nested(MAX_DEPTH - 1, *brackets))
    assert parse(at_most)[1] == orjson.loads(at_most.replace(b"NaN", b"1"))[1]
    for levels in (MAX_DEPTH, 1_000):
        with pytest.raises(BadRequest, match="JSON nesting depth exceeds"):
            parse(b"[%b,%b]" % (beside, nested(levels, *brackets)))


@pytest.mark.parametrize("digits", ["9" * 31, "-" + "9" * 31, str(2**64), str(2**64 - 1), str(-(2**63))])
def test_beside_nan_a_long_integer_is_the_number_that_it_is_without(digits: str) -> None:
    (alone,), (_, beside) = parse(f"[{digits}]".encode()), parse(f"[NaN,{digits}]".encode())
    assert (type(beside), beside) == (type(alone), alone)


def test_beside_nan_an_integer_that_no_number_holds_is_refused_as_it_is_without() -> None:
    for text in (b"[%b]" % (b"9" * 400), b"[NaN,%b]" % (b"9" * 400)):
        with pytest.raises(BadRequest, match="is not JSON"):
            parse(text)
