"""Inputs that are nearly right: valid ones with bytes, numbers, words and whole parts changed. Seeded."""

import json
import random
from collections.abc import Sequence
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    63,
    64,
    127,
    128,
    255,
    256,
    65_535,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    2**70,
)
WORDS = (
    b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"NaN", b"-Infinity", b"1e999", b"-0", b"null", b"true", b"[]", b"{}",
    b'""', b'"', b"'", b"\\u0000", b"\\ud800", b"\r\n", b"\r\n\r\n", b"\n", b",", b":", b"[" * 40, b"{" * 40,
    b'{"a":' * 40, b"[" * 3000, b"9" * 30, b"9" * 5000, b"../..", b"/", b"PK\3\4", b"PK\5\6", b"=", b"\t", b"A" * 300,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**70, 0.5, 1e308, -0.0, "", "x", "\0", "é\ud800", "1",
    "A" * 200, [], {}, [None], [[]], [1, 2], {"a": 1}, {"": None}, [[1, 2], [3]], [True], ["a"], [0.5],
)  # fmt: skip


class Mutator:
    """A source of inputs for one target, drawn from its seeds: the same ones for the same number."""

    def __init__(self, seeds: Sequence[bytes], number: int) -> None:
        self._seeds, self._random = list(seeds), random.Random(number)

    def draw(self) -> bytes:
        chance = self._random
        data = chance.choice(self._seeds)
        if chance.random() < 0.4 and (changed := self._changed_json(data)) is not None:
            return changed
        found = bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 2, 3, 6, 12))):
            self._change(found)
        return bytes(found)

    def _change(self, data: bytearray) -> None:
        chance = self._random
        place = chance.randrange(len(data) + 1)
        length = chance.choice((1, 1, 2, 4, 8, 30, 200))
        match chance.randrange(9):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[min(place, len(data) - 1)] = chance.randrange(256)
            case 2:
                data[place:place] = chance.randbytes(length)
            case 3:
                del data[place : place + length]
            case 4:
                data[place:place] = data[place : place + length] * chance.choice((1, 2, 50))
            case 5:
                data[place : place + chance.choice((0, length))] = chance.choice(WORDS)
            case 6:
                width = chance.choice((1, 2, 4, 8))
                number = chance.choice(NUMBERS) % 256**width
                data[place : place + width] = number.to_bytes(width, chance.choice(("little", "big")))
            case 7:
                del data[place:]
            case _:
                other = chance.choice(self._seeds)
                start = chance.randrange(len(other) + 1)
                data[place : place + length] = other[start : start + chance.choice((length, len(other)))]

    def _changed_json(self, data: bytes) -> bytes | None:
        """Another value at some places of a JSON document; None where it is none."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return None
        for _ in range(self._random.choice((1, 1, 2, 4))):
            document = changed_value(document, self._random)
        return json.dumps(document).encode(errors="replace")


def changed_value(document: Any, chance: random.Random) -> Any:
    """The document with one value, key or item of it changed, at any depth."""
    if not isinstance(document, dict | list) or not document or chance.random() < 0.1:
        return chance.choice(VALUES)
    copy: Any = dict(document) if isinstance(document, dict) else list(document)
    key = chance.choice(list(document) if isinstance(document, dict) else range(len(document)))
    match chance.randrange(6):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[chance.choice([*copy, "unknown", ""])] = copy.pop(key)
        case 1 | 2 if isinstance(copy, list):
            copy += [copy[key]] * chance.choice((1, 2, 100))
        case _:
            copy[key] = changed_value(copy[key], chance)
    return copy
