"""Reads protobuf's text format (``config.pbtxt``) without its schema, with bounds on size and depth.

The schema belongs to Triton, and fields that it does not have yet must be named to the operator, not lost. Protobuf's
own tokenizer reads names, numbers and strings. Extensions (``[name]``) are refused.
"""

import re
from pathlib import Path
from typing import Any

from google.protobuf.text_format import ParseError, Tokenizer

from ...models.errors import BadFolder, TooLarge
from .imported import foreign_text

MAX_BYTES = 4 << 20
MAX_DEPTH = 32  # of messages in messages
_LONGEST = 200  # characters of a fault: it repeats the line
_MOST_CHARACTERS = 32  # of a number: 64 bits have 21
_STRING = re.compile(r"""(?:[^\\]|\\[abfnrtv'"\\0-7xuU])*""")
_CLOSES = {"{": "}", "<": ">"}


class Word(str):
    """An identifier that stands as a value: a name of an enumeration, or true and false."""


Message = dict[str, list[Any]]  # of str, Word, int, float, Message


class _Tokens(Tokenizer):
    """Refuses an escape that protobuf's Python does not know: it would warn, and keep the backslash."""

    def NextToken(self) -> None:
        super().NextToken()
        if self.token[:1] in ("'", '"') and not _STRING.fullmatch(self.token):
            fault = "Expected a string with escapes such as \\n or \\x41 only."
            raise self.ParseError(fault)  # type: ignore[arg-type]  (of the stubs)


def read_text_format(path: Path, folder: Path) -> Message:
    """The message in a file of ``folder``: every field with all its values, in order.

    Raises TooLarge beyond `MAX_BYTES` or `MAX_DEPTH`, BadFolder naming the line for what is not the text format.
    """
    text = foreign_text(folder, path, MAX_BYTES, "the configuration of one model")
    try:
        return _message(_Tokens(text.split("\n")), "", 0)
    except ParseError as error:
        raise BadFolder(
            f"{path}:{error.GetLine()}: expected the text format of protobuf, got {str(error)[:_LONGEST]}"
        ) from None
    except RecursionError:
        raise TooLarge(f"{path}: messages are nested more than {MAX_DEPTH} deep") from None


def _message(tokens: Tokenizer, end: str, depth: int) -> Message:
    """The fields of a message, read up to the token ``end``; "" stands for the end of the file."""
    if depth > MAX_DEPTH:
        raise RecursionError
    found: Message = {}
    while not tokens.TryConsume(end):
        found.setdefault(tokens.ConsumeIdentifier(), []).extend(_values(tokens, depth))
        if not tokens.TryConsume(","):
            tokens.TryConsume(";")
    return found


def _values(tokens: Tokenizer, depth: int) -> list[Any]:
    """The values that follow a field's name: a single value, or all values of a list in brackets."""
    scalar = tokens.TryConsume(":")
    if not tokens.TryConsume("["):
        return [_value(tokens, scalar, depth)]
    found: list[Any] = []
    while found or not tokens.TryConsume("]"):
        found.append(_value(tokens, scalar, depth))
        if not tokens.TryConsume(","):
            tokens.Consume("]")
            break
    return found


def _value(tokens: Tokenizer, scalar: bool, depth: int) -> Any:
    text = tokens.token
    if text in _CLOSES:
        tokens.Consume(text)
        return _message(tokens, _CLOSES[text], depth + 1)
    if not scalar:
        raise tokens.ParseError("Expected ':' or '{'.")  # type: ignore[arg-type]  (of the stubs)
    if text[:1] in ("'", '"'):
        return tokens.ConsumeString()
    if text[:1].isalpha() or text[:1] == "_":
        is_number = text.lower() in ("inf", "infinity", "nan")
        return tokens.ConsumeFloat() if is_number else Word(tokens.ConsumeIdentifier())
    if len(text) > _MOST_CHARACTERS:
        raise tokens.ParseError("Expected numbers of 64 bits.")  # type: ignore[arg-type]
    try:
        return tokens.ConsumeInteger()
    except ParseError:
        return tokens.ConsumeFloat()
