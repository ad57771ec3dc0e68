"""``multipart/form-data`` that has come whole: its parts, with bounds on their number and headers (RFC 7578)."""

from collections.abc import Callable
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ....models.errors import BadRequest, TooLarge

_MAX_HEADERS, _MAX_HEADER_BYTES = 8, 2048  # of each part


class FormPart(NamedTuple):
    """``name`` is the form's field, ``filename`` what the sender calls the file (to show, never to open)."""

    name: str
    filename: str
    data: bytes

    @property
    def shown(self) -> str:
        return repr(self.filename[-60:]) if self.filename else f"of field {self.name[:60]!r}"


def is_multipart(content_type: str) -> bool:
    return content_type.split(";")[0].strip().lower() == "multipart/form-data"


def read_parts(content_type: str, body: bytes, most: int) -> list[FormPart]:
    """The parts in their order. Raises BadRequest, TooLarge where there are more than ``most``."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:  # RFC 2046, 5.1.1
        raise BadRequest("the content type multipart/form-data needs a boundary of 1 to 70 characters")
    form = _Form(boundary, most)
    try:
        form.parser.write(body)
    except FormParserError as fault:
        raise BadRequest(f"the body is not the multipart form that its header promises: {fault}") from None
    if not form.ended:
        raise BadRequest("the multipart form breaks off before its last boundary; send it again")
    return form.parts


class FormReader:
    """The parser of a form, with bounds on the headers of each part. ``callbacks``: what it calls for the parts
    themselves, by the parser's names."""

    def __init__(self, boundary: bytes, **callbacks: Callable[..., None]) -> None:
        self.ended = False
        self._header, self._value, self._disposition = b"", b"", b""
        ours = {
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_end": self._on_end,
        }
        self.parser = MultipartParser(
            boundary,
            {**ours, **callbacks},  # type: ignore[arg-type]
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )

    def field_and_file(self) -> tuple[str, str]:
        """The names of the part's field and of its file, once its headers are read."""
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        name, filename = (options.get(key, b"").decode("utf-8", "replace") for key in (b"name", b"filename"))
        return name, filename

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _on_end(self) -> None:
        self.ended = True


class _Form(FormReader):
    """The parts of a form, in memory."""

    def __init__(self, boundary: bytes, most: int) -> None:
        super().__init__(boundary, on_part_data=self._on_part_data, on_part_end=self._on_part_end)
        self.parts: list[FormPart] = []
        self._most, self._data = most, bytearray()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += memoryview(data)[start:end]

    def _on_part_end(self) -> None:
        if len(self.parts) == self._most:
            raise TooLarge(f"the form has more than {self._most} parts, the most that one request may have")
        self.parts.append(FormPart(*self.field_and_file(), bytes(self._data)))
        self._data = bytearray()
