"""Reads protobuf's text format (``config.pbtxt``) without its schema, with bounds on size and depth.

The schema belongs to Triton, and fields that it does not have yet must be named to the operator, not lost. The
language: https://protobuf.dev/reference/protobuf/textformat-spec/. Extensions (``[name]``) are refused.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...models.errors import BadFolder, TooLarge
from .foreign_files import foreign_bytes

MAX_BYTES = 4 << 20
MAX_DEPTH = 32  # of messages in messages
_MOST_NUMBER, _MOST_DIGITS = 2**64 - 1, 24  # of any base


class Word(str):
    """An identifier that stands as a value: a name of an enumeration, or true and false."""


Message = dict[str, list[Any]]  # of str, Word, int, float, Message

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?[fF]?)(?![\w.]))
    |(?P<word>[A-Za-z_]\w*)
    |(?P<sign>[-{}<>\[\]:,;])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(
    rb"""\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([abfnrtv?'"\\]))"""
)
_LETTERS = dict(zip(b"abfnrtv?'\"\\", b"\a\b\f\n\r\t\v?'\"\\", strict=True))
_CLOSES = {"{": "}", "<": ">"}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def read_text_format(path: Path, folder: Path) -> Message:
    """The message in a file of ``folder``: every field with all its values, in order.

    Raises TooLarge beyond `MAX_BYTES` or `MAX_DEPTH`, BadFolder naming the line for what is not the text format.
    """
    data = foreign_bytes(folder, path, MAX_BYTES, "the configuration of one model")
    try:
        return _Reader(path, data.decode()).message("", 0)
    except UnicodeDecodeError as error:
        raise BadFolder(f"{path} is not UTF-8 text ({error})") from error


class _Reader:
    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.tokens = self.split(text)
        self.next = next(self.tokens)

    def split(self, text: str) -> Iterator[_Token]:
        at, line = 0, 1
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.error(line, "the text format of protobuf", text[at : at + 20])
            if match.lastgroup != "space":
                yield _Token(str(match.lastgroup), match[0], line)
            line += match[0].count("\n")
            at = match.end()
        yield _Token("end", "", line)

    def take(self) -> _Token:
        token = self.next
        if token.kind != "end":
            self.next = next(self.tokens)
        return token

    def message(self, end: str, depth: int) -> Message:
        """The fields of a message, read up to the token ``end``; "" stands for the end of the file."""
        if depth > MAX_DEPTH:
            raise TooLarge(f"{self.path}:{self.next.line}: messages are nested more than {MAX_DEPTH} deep")
        found: Message = {}
        while self.next.text != end:  # the text of a string has its quotes
            name = self.take()
            if name.kind != "word":
                raise self.error(name.line, f"a field's name{f' or {end!r}' if end else ''}", name.text)
            found.setdefault(name.text, []).extend(self.values(depth))
            if self.next.text in (",", ";"):
                self.take()
        self.take()
        return found

    def values(self, depth: int) -> list[Any]:
        """The values that follow a field's name: a single value, or all values of a list in brackets."""
        scalar = self.next.text == ":"
        if scalar:
            self.take()
        if self.next.text != "[":
            return [self.value(scalar, depth)]
        self.take()
        found: list[Any] = []
        while self.next.text != "]":
            found.append(self.value(scalar, depth))
            if self.next.text == ",":
                self.take()
                if self.next.text == "]":
                    raise self.error(self.next.line, "a value after the comma", "]")
            elif self.next.text != "]":
                raise self.error(self.next.line, "',' or ']'", self.next.text)
        self.take()
        return found

    def value(self, scalar: bool, depth: int) -> Any:
        token = self.take()
        if token.text in _CLOSES:
            return self.message(_CLOSES[token.text], depth + 1)
        if not scalar:
            raise self.error(token.line, "':' or '{'", token.text)
        if token.kind == "text":
            texts = [token]
            while self.next.kind == "text":
                texts.append(self.take())
            return self.joined(texts)
        negative = token.text == "-"
        token = self.take() if negative else token
        if token.kind == "number":
            number = _number(token.text)
            if number is None:
                raise self.error(token.line, "a number", token.text)
            return -number if negative else number
        if token.kind == "word" and token.text.lower().removesuffix("inity") in ("inf", "nan"):
            return -float(token.text) if negative else float(token.text)
        if token.kind == "word" and not negative:
            return Word(token.text)
        raise self.error(token.line, "a value", token.text)

    def joined(self, tokens: list[_Token]) -> str:
        """The text of adjacent string tokens, which form one string. Escapes stand for bytes of its UTF-8 encoding."""
        data = b"".join(_ESCAPE.sub(_unescaped, token.text[1:-1].encode()) for token in tokens)
        for token in tokens:
            if b"\\" in _ESCAPE.sub(b"", token.text[1:-1].encode()):
                raise self.error(token.line, "a known escape after the backslash", token.text)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.error(tokens[0].line, "a string of UTF-8", tokens[0].text) from None

    def error(self, line: int, expected: str, came: str) -> BadFolder:
        return BadFolder(f"{self.path}:{line}: expected {expected}, got {came[:40]!r}")


def _number(text: str) -> int | float | None:
    for pattern, base in ((r"0[xX][0-9a-fA-F]+", 16), (r"0[0-7]+", 8), (r"0|[1-9]\d*", 10)):
        if re.fullmatch(pattern, text):
            number = int(text, base) if len(text) <= _MOST_DIGITS else _MOST_NUMBER + 1
            return number if number <= _MOST_NUMBER else None
    return None if re.fullmatch(r"0\d+", text) else float(text.rstrip("fF"))


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, letter = match.groups()
    if octal:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal:
        return bytes([int(hexadecimal, 16)])
    if letter:
        return bytes([_LETTERS[letter[0]]])
    point = int(short or long, 16)
    return chr(point).encode("utf-8", "surrogatepass") if point < 0x110000 else b"\xff"
