"""JSON numbers to arrays and back: strict when reading; NaN and infinity are written as asked, and counted.

`infer.py` and `predict.py` share it. Strict means that nothing is coerced: 1.5 is no INT64, true is no
FP32, 300 is no UINT8, and 70000 is no FP16.
"""

import json
import math
import re
import struct
from collections.abc import Sequence
from itertools import chain, compress, zip_longest
from typing import Any

import ml_dtypes
import numpy as np
import orjson

from ....models.errors import BadRequest
from ....models.spec.datatypes import Datatype
from ..limits.request_limits import DEFAULTS

MAX_DEPTH = DEFAULTS.json_depth
_TOO_DEEP = f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})"
_BEGINNING = 8  # bytes of a body that a message quotes
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that is half of a surrogate pair
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STEPS = np.zeros(256, np.int8)  # by which each byte of JSON changes the depth
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_BF16 = np.dtype(ml_dtypes.bfloat16)
_C_CODES = {  # the same letters mean the same types to struct and to numpy
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
    "INT64": "q", "FP16": "d", "BF16": "d", "FP32": "f", "FP64": "d",
}  # fmt: skip


def parse(text: bytes, what: str = "the request") -> Any:
    """Read JSON of at most `MAX_DEPTH` levels; bare NaN, Infinity and -Infinity are numbers, as Triton takes them.
    Raises BadRequest, which calls the text ``what``."""
    found = parse_tensors(text, what)
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _is_too_deep(text):
        raise BadRequest(_TOO_DEEP)
    return found


def parse_tensors(text: bytes, what: str = "the request") -> Any:
    """Read JSON as `parse` does, without the check of its depth: `array_of` refuses data that is nested too deep. A
    message must quote any other value of it by `show`, for `repr` fails on very deep ones."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "depth limit" in str(error):  # orjson's own is 1024 levels
            raise BadRequest(_TOO_DEEP) from None
        if b"NaN" in text or b"Infinity" in text:
            return _parse_with_nan(text, what)
        raise BadRequest(f"{what} is not JSON: {_why_not(text, error)}") from None


def _is_too_deep(text: bytes) -> bool:
    """True if ``text``, which is JSON, has more than `MAX_DEPTH` levels. Its brackets are counted: to visit each parsed
    element would take longer than to parse the text."""
    brackets = np.frombuffer(_STRING.sub(b"", text), np.uint8)
    return bool(_STEPS[brackets].cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH)


def _why_not(text: bytes, error: Exception) -> str:
    """The reason why a body is not JSON: it is empty, it is no text, or where its text breaks the rules."""
    if not text:
        return "its body is empty"
    try:
        text.decode()
    except UnicodeDecodeError:
        return f"its body is no text, it begins with {text[:_BEGINNING]!r}"
    return str(error)


def _parse_with_nan(text: bytes, what: str) -> Any:
    try:
        message = json.loads(text.decode(), parse_int=_integer)
        if _HALF_PAIR.search(text):
            json.dumps(message, ensure_ascii=False).encode()  # refuses half a pair, as orjson does
        return message
    except RecursionError:
        raise BadRequest(_TOO_DEEP) from None
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"{what} is not JSON: {error}") from None


def _integer(digits: str) -> int | float:
    """A number of more than 64 bits is a float, as orjson has it: orjson could not write it as an integer."""
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else float(number)


def array_of(data: object, datatype: Datatype, where: str) -> np.ndarray:
    """Nested or flat JSON ``data`` as an array of its own shape.

    Raises BadRequest where it is ragged, too deep, or holds what ``datatype`` does not; the message
    begins with ``where`` and the place in the data: ``instances[3][0][2]: …``.
    """
    flat, shape = _flatten(data, where)
    try:
        return _typed(flat, datatype).reshape(shape)
    except (TypeError, OverflowError):
        index = _first_bad(flat, datatype)
        raise BadRequest(
            f"{where}{_place(index, shape)}: expected {_wanted(datatype)}, got {show(flat[index])}"
        ) from None


def number_of(value: object, datatype: Datatype, where: str) -> np.ndarray:
    """One JSON number as an array without axes; lists of one element may be around it. Raises BadRequest as `array_of`,
    and where there are several numbers or none."""
    array = array_of([value], datatype, where)
    if array.size != 1:
        raise BadRequest(f"{where}: expected one number, got {array.size}")
    return array.reshape(())


def _flatten(data: object, where: str) -> tuple[list[Any], list[int]]:
    if not isinstance(data, list):
        raise BadRequest(f"{where}: expected a list of numbers, nested or flat, got {show(data)}")
    flat: list[Any] = data
    shape = [len(flat)]
    while flat and type(flat[0]) is list:
        if len(shape) == MAX_DEPTH:
            raise BadRequest(_TOO_DEEP)
        width = len(flat[0])
        uneven = (i for i, row in enumerate(flat) if type(row) is not list or len(row) != width)
        if (index := next(uneven, None)) is not None:
            raise BadRequest(
                f"{where}{_place(index, shape)}: expected a list of {width} like the others, "
                f"got {show(flat[index])}"
            )
        flat = list(chain.from_iterable(flat))
        shape.append(width)
    return flat, shape if len(shape) <= 64 else _without_ones(shape)


def _without_ones(shape: list[int]) -> list[int]:
    """numpy holds 64 axes; deeper data is legal where the axes are of size 1."""
    kept = [size for size in shape if size != 1]
    if len(kept) > 64:
        raise BadRequest(_TOO_DEEP)
    return kept or [1]


def _typed(flat: list[Any], datatype: Datatype) -> np.ndarray:
    """One-dimensional, of the datatype. Raises TypeError or OverflowError where any element is not of it.

    A piece at a time, for each conversion keeps the interpreter's lock until its end.
    """
    if len(flat) <= PIECE:
        return _typed_piece(flat, datatype)
    typed = np.empty(len(flat), datatype.numpy)
    for at in range(0, len(flat), PIECE):
        typed[at : at + PIECE] = _typed_piece(flat[at : at + PIECE], datatype)
    return typed


def _typed_piece(flat: list[Any], datatype: Datatype) -> np.ndarray:
    if datatype.name == "BOOL":
        if not set(map(type, flat)) <= {bool}:
            raise TypeError
        return np.array(flat, np.bool_)
    code = _C_CODES[datatype.name]
    try:  # struct refuses strings, None, lists and (for integers) fractions and numbers out of range
        wide = np.frombuffer(struct.pack(f"{len(flat)}{code}", *flat), code)
    except struct.error:
        raise TypeError from None
    # Bools are integers to it; only zeros and ones can have been bools, so most data need no second walk.
    suspects = (wide == 0) | (wide == 1)
    if suspects.any() and bool in map(type, compress(flat, suspects.tobytes())):
        raise TypeError
    return _narrowed(wide, flat, datatype) if datatype.is_float else wide


def _narrowed(wide: np.ndarray, flat: list[Any], datatype: Datatype) -> np.ndarray:
    """Rounded to the datatype. Raises OverflowError where a finite number is beyond it."""
    values = wide
    if wide.dtype != datatype.numpy:
        with np.errstate(over="ignore"):
            values = wide.astype(datatype.numpy)
    finite = np.isfinite(values)
    if not finite.all() and any(math.isfinite(flat[index]) for index in np.flatnonzero(~finite)):
        raise OverflowError
    return values


def _first_bad(flat: list[Any], datatype: Datatype) -> int:
    """The first element that is not of the datatype, by halving: a long list costs one more conversion."""
    low, high = 0, len(flat)  # all before low are good, one before high is bad
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _typed(flat[low:middle], datatype)
            low = middle
        except (TypeError, OverflowError):
            high = middle
    return low


def _place(index: int, shape: list[int]) -> str:
    return "".join(f"[{i}]" for i in np.unravel_index(index, shape))


def _wanted(datatype: Datatype) -> str:
    if datatype.name == "BOOL":
        return "true or false for BOOL"
    if datatype.is_float:
        return f"a number for {datatype.name} (at most {float(ml_dtypes.finfo(datatype.numpy).max):.6g})"
    limits = np.iinfo(datatype.numpy)
    return f"an integer for {datatype.name} ({limits.min} to {limits.max})"


def show(value: object) -> str:
    """The value as JSON, cut to the length of a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def writable(array: np.ndarray) -> np.ndarray:
    """The array as orjson can write it: C-contiguous, and BF16 as the FP32 numbers that it is exactly."""
    # `ascontiguousarray` would give a scalar an axis.
    return np.asarray(array.astype(np.float32) if array.dtype == _BF16 else array, order="C")


_NUMPY = orjson.OPT_SERIALIZE_NUMPY
# Elements that are written at once, in 4 ms or less: orjson keeps the interpreter's lock until it has written, so that
# the event loop waits for it wherever it runs.
PIECE = 2**16
MANY = 2**17  # elements that take so long to write that another thread writes them
_TOKENS = {  # NaN, +Infinity, -Infinity
    "token": (b"NaN", b"Infinity", b"-Infinity"),
    "string": (b'"NaN"', b'"Infinity"', b'"-Infinity"'),
    "null": (b"null", b"null", b"null"),
}


def dump_flat(array: np.ndarray, nan_as: str = "token") -> tuple[bytes, int]:
    """The elements as a flat JSON list, and how many are not finite: bare tokens, ``string``s or ``null``."""
    flat = writable(array).reshape(-1)
    written = [_dump_piece(flat[at : at + PIECE], nan_as) for at in range(0, flat.size, PIECE)]
    return b"[%b]" % b",".join(text[1:-1] for text, _ in written), sum(odd for _, odd in written)


def dump_rows(rows: Sequence[Any] | np.ndarray, elements: int) -> orjson.Fragment:
    """The JSON list of rows, each of about so many ``elements``: arrays, or what else orjson writes."""
    together = max(PIECE // max(elements, 1), 1)
    written = (
        orjson.dumps(rows[at : at + together], option=_NUMPY)[1:-1] for at in range(0, len(rows), together)
    )
    return orjson.Fragment(b"[%b]" % b",".join(written))


def dump_nested(array: np.ndarray) -> np.ndarray | orjson.Fragment:
    """The nested lists of the array, for orjson to write. The array is one that `writable` gave."""
    if array.size <= PIECE:
        return array
    if array.ndim == 1:
        return orjson.Fragment(dump_flat(array, "null")[0])
    row = array[0].size
    return dump_rows(array if row <= PIECE else [dump_nested(one) for one in array], row)


def _dump_piece(flat: np.ndarray, nan_as: str) -> tuple[bytes, int]:
    text = orjson.dumps(flat, option=_NUMPY)
    if b"null" not in text:  # what orjson writes for a number that is not finite
        return text, 0
    nan, above, below = _TOKENS[nan_as]
    odd = flat[~np.isfinite(flat)].tolist()
    tokens = [nan if x != x else above if x > 0 else below for x in odd]
    return b"".join(chain.from_iterable(zip_longest(text.split(b"null"), tokens, fillvalue=b""))), len(odd)
