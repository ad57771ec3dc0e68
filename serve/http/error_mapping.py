"""The one table from errors to HTTP statuses and exit codes, and the bodies and headers of error answers.

No other file knows both sides.
"""

import errno
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import orjson

from ...models import errors
from ...models.files.durable import free_there, may_not_be_written
from .limits.request_limits import DEFAULTS

T = TypeVar("T")
Reaches = Callable[[str], bool]  # whether a reader may be told of the model


class NotOffered(errors.BadInput):
    """This server does not offer a part of a protocol. The message names the alternative."""

    code = "not_offered"


class UnreadableTensor(errors.BadRequest):
    """The JSON is no tensor: it has a negative size, or data that does not fill its shape. Correct shape or data.
    Triton answers with 500."""

    code = "unreadable_tensor"


class UnknownCoding(NotOffered):
    """A Content-Encoding that this server does not read. Send the body as it is, or by gzip or deflate."""

    code = "unknown_coding"


class Unready(errors.NotReady):
    """The server or the model is not ready yet: an answer to a probe. The message says what it waits for."""

    code = "unready"


class LoadFailed(errors.CannotServe):
    """A version that was to be loaded over HTTP cannot serve. The message says why; the version before still serves."""

    code = "load_failed"


class SlowBody(errors.BadInput):
    """The request's body did not arrive in time. Send it faster, or raise HALFEVEN_BODY_SECONDS."""

    code = "slow_body"


class ForeignHost(errors.BadInput):
    """The request was sent to a name that is not this server's. Name it with --allowed-hosts."""

    code = "foreign_host"


class ForeignPage(errors.BadInput):
    """A web page of another origin sent a request that may change something. Allow its origin with --cors-origins."""

    code = "foreign_origin"


class NotJson(errors.BadInput):
    """The content type of an order is not JSON. Send `Content-Type: application/json` (curl --json)."""

    code = "not_json"


class HeadTooLarge(errors.TooLarge):
    """The request's head, its trailers or its chunk extensions are beyond their bounds. Send fewer headers."""

    code = "head_too_large"


class UrlTooLong(errors.TooLarge):
    """The request line is beyond its bound. Send the data in the body."""

    code = "url_too_long"


class NoDescriptor(errors.Overloaded):
    """The process has no file descriptor left for another connection. Raise `ulimit -n`, or ask later."""

    code = "no_descriptor"


class TooManyConnections(errors.Overloaded):
    """The server has as many open connections as it may have. Close unused ones, or raise HALFEVEN_MAX_CONNECTIONS."""

    code = "too_many_connections"


# The nearest class along the error's own ancestry wins.
_STATUS: dict[type[BaseException], HTTPStatus] = {
    errors.BadInput: HTTPStatus.BAD_REQUEST,
    errors.TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HeadTooLarge: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    UrlTooLong: HTTPStatus.REQUEST_URI_TOO_LONG,
    errors.UnknownName: HTTPStatus.NOT_FOUND,
    errors.Conflict: HTTPStatus.CONFLICT,
    NotOffered: HTTPStatus.NOT_IMPLEMENTED,
    SlowBody: HTTPStatus.REQUEST_TIMEOUT,
    ForeignHost: HTTPStatus.MISDIRECTED_REQUEST,
    ForeignPage: HTTPStatus.FORBIDDEN,
    errors.Unauthenticated: HTTPStatus.UNAUTHORIZED,
    errors.Forbidden: HTTPStatus.FORBIDDEN,
    NotJson: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.CannotConvert: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.ParityRefused: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.DiskFull: HTTPStatus.INSUFFICIENT_STORAGE,
    errors.CannotServe: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.KeyLimitReached: HTTPStatus.TOO_MANY_REQUESTS,
    errors.EngineFailed: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.EndpointFailed: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.EndpointTimedOut: HTTPStatus.GATEWAY_TIMEOUT,
    LoadFailed: HTTPStatus.INTERNAL_SERVER_ERROR,
    BaseException: HTTPStatus.INTERNAL_SERVER_ERROR,
}
# The statuses as Triton answers, with --triton-strict and on /v2 alone.
_TRITON_STATUS = {
    **_STATUS,
    errors.UnknownName: HTTPStatus.BAD_REQUEST,
    errors.TooLarge: HTTPStatus.BAD_REQUEST,
    Unready: HTTPStatus.BAD_REQUEST,
    UnreadableTensor: HTTPStatus.INTERNAL_SERVER_ERROR,
}
# The gRPC status of an HTTP status. Source: the gRPC status codes' own descriptions.
_GRPC = {
    HTTPStatus.BAD_REQUEST: "INVALID_ARGUMENT",
    HTTPStatus.UNAUTHORIZED: "UNAUTHENTICATED",
    HTTPStatus.FORBIDDEN: "PERMISSION_DENIED",
    HTTPStatus.NOT_FOUND: "NOT_FOUND",
    HTTPStatus.REQUEST_TIMEOUT: "DEADLINE_EXCEEDED",
    HTTPStatus.CONFLICT: "FAILED_PRECONDITION",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RESOURCE_EXHAUSTED",
    HTTPStatus.UNPROCESSABLE_ENTITY: "FAILED_PRECONDITION",
    HTTPStatus.TOO_MANY_REQUESTS: "RESOURCE_EXHAUSTED",
    HTTPStatus.NOT_IMPLEMENTED: "UNIMPLEMENTED",
    HTTPStatus.INSUFFICIENT_STORAGE: "RESOURCE_EXHAUSTED",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
    HTTPStatus.GATEWAY_TIMEOUT: "DEADLINE_EXCEEDED",
}
_EXIT: dict[type[BaseException], int] = {
    errors.BadInput: 2,
    errors.ParityRefused: 3,
    errors.CannotConvert: 4,
    errors.StoreUnusable: 2,
    OSError: 2,  # a file or folder that the caller named
    BaseException: 1,
}
# The meaning of each exit code of the command line; 1 to 4 of an error are those of `_EXIT`.
EXIT_CODES = {
    0: "done",
    1: "anything else: no server answers, a full disk, a damaged version, halfeven's own fault, interrupted by Ctrl-C",
    2: "bad usage or input, or a file, folder or store that cannot be opened; the message names it",
    3: "refused: by the parity gate, or by what judges a fine-tuned version; or a check found something (`lint`, "
    "`selftest`, `reproduce`, `verify`, `check`, `diff`, `index-check`)",
    4: "cannot be captured, converted or exported",
}
_LONGEST, _QUOTED = DEFAULTS.error_characters, DEFAULTS.quoted_characters
_LONG_QUOTATION = re.compile(
    rf"(?<!\w)'[^']{{{_QUOTED},}}'(?!\w)|\"[^\"]{{{_QUOTED},}}\"|\S{{{_QUOTED},}}"  # no apostrophe of a word
)
_FOLDERS = re.compile(r"(?<![\w./:])/(?!v[12]/)(?:[^\s/'\"]+/)+")
# The store's own folder is its last name too. Behind "in the store" a colon or the sentence's end follows.
_STORE = re.compile(r"(?<=\bin the store) /[^:]*|(?<=\bthe store) /[^\s:;,'\"]+")
_private_folders: list[str] = []  # of the servers in this process
_SENTENCES = frozenset(("reason", "fault", "message", "notes"))  # names of what is a sentence in facts
_HIDDEN = "internal error: this is a bug in halfeven, not in the request; the server's log has the traceback"


def no_model(name: str) -> bool:
    """Always False, for a caller about whom nothing is known: no model is named to such a caller."""
    return False


def of_the_disk(error: BaseException) -> BaseException:
    """DiskFull in the place of the system's error of a write: it says what was written, and how much is free."""
    if not isinstance(error, OSError) or not may_not_be_written(error):
        return error
    what = Path(str(error.filename)) if error.filename else None
    named = "a file of the server" if what is None else what.name
    # The error of a write through a handle does not name the disk.
    free = "" if what is None else f" ({free_there(what)})"
    why = "is read-only" if error.errno == errno.EROFS else f"is full{free}"
    return errors.DiskFull(
        f"{named} cannot be written, its disk {why}: nothing was changed; make room there (delete files, versions or "
        "models, or give the disk more), then ask again"
    )


def status_of(error: BaseException, as_triton: bool = False) -> int:
    """The HTTP status of an error; ``as_triton``: the one that Triton answers with."""
    return int(_nearest(_TRITON_STATUS if as_triton else _STATUS, of_the_disk(error)))


def grpc_status_of(error: BaseException) -> str:
    """The name of the gRPC status of an error."""
    return _GRPC.get(_nearest(_STATUS, of_the_disk(error)), "INTERNAL")


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this error (1 or more)."""
    return _nearest(_EXIT, error)


def _nearest(table: dict[type[BaseException], T], error: BaseException) -> T:
    return next(table[kind] for kind in type(error).__mro__ if kind in table)


def retry_after_of(error: BaseException) -> int | None:
    """Whole seconds for ``Retry-After``, at least 1; None where a retry does not help."""
    if isinstance(error, errors.Overloaded):
        return max(1, math.ceil(error.retry_after_s))
    return None


def headers_of(error: BaseException) -> dict[str, str]:
    """The headers of an error's answer: when to retry, how to send a key, which codings are read, or that the
    connection is closed."""
    headers = {}
    if isinstance(error, SlowBody):  # what still comes of the body belongs to no request
        headers["connection"] = "close"
    if (seconds := retry_after_of(error)) is not None:
        headers["retry-after"] = str(seconds)
    if isinstance(error, errors.Unauthenticated):
        # Basic: a browser then asks its user (RFC 7617). It comes first, for Chromium reads the first scheme of a line.
        headers["www-authenticate"] = 'Basic realm="halfeven", Bearer realm="halfeven"'
    if isinstance(error, UnknownCoding):
        headers["accept-encoding"] = "gzip, deflate"
    return headers


def message_of(error: BaseException, reaches: Reaches = no_model) -> str:
    """The message that the caller may read: our own errors' text without folders, naming only models for which
    ``reaches`` is true; other errors' text stays in the log."""
    error = of_the_disk(error)
    if not isinstance(error, errors.HalfevenError):
        return _HIDDEN
    text = error.words_for(reaches) if isinstance(error, errors.UnknownName) else str(error)
    return _shortened(without_folders(text))[:_LONGEST]  # no folder is cut before it is known as one


def _shortened(text: str) -> str:
    """The text with its long words and quotations cut: a message quotes the request, which may be of any length."""
    return _LONG_QUOTATION.sub(lambda found: f"{found[0][: _QUOTED // 2]}…", text)


@contextmanager
def hidden_folders(folders: Iterable[Path | None]) -> Iterator[None]:
    """Within the block no message tells a caller of these folders, whatever characters their names have: elsewhere a
    path is known by its form, which a space ends."""
    paths = {
        path for folder in folders if folder is not None for path in (folder.absolute(), folder.resolve())
    }
    names = [str(path) for path in paths if path.name]
    _private_folders.extend(names)
    try:
        yield
    finally:
        for name in names:
            _private_folders.remove(name)


def without_folders(text: str) -> str:
    """The text with the names of files instead of their paths, and the store without its folder: where it lies is not
    the caller's business.

    Paths of routes (``/v1/…``, ``/v2/…``) stay.
    """
    for folder in sorted(_private_folders, key=len, reverse=True):
        if folder in text:
            name = re.escape(folder)
            text = re.sub(rf" {name}(?!\.?[\w/-])", "", re.sub(rf"(?<![\w./:]){name}(?=/)", "/_", text))
    return _FOLDERS.sub("", _STORE.sub("", text))


def for_callers(facts: Any) -> Any:
    """Facts as JSON holds them, whose sentences (reasons, faults, messages, notes) are `without_folders`."""
    if isinstance(facts, Mapping):
        return {
            key: _sentences(value) if key in _SENTENCES else for_callers(value)
            for key, value in facts.items()
        }
    return [for_callers(one) for one in facts] if isinstance(facts, list | tuple) else facts


def _sentences(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_sentences(one) for one in value]
    return without_folders(value) if isinstance(value, str) else value


def body_of(
    error: BaseException, path: str, reaches: Reaches = no_model, accept: str = ""
) -> tuple[bytes, str]:
    """The error's body and content type, as `body_for`. ``reaches``: as `message_of`."""
    error = of_the_disk(error)
    code = error.code if isinstance(error, errors.HalfevenError) else "internal_error"
    message, param = message_of(error, reaches), getattr(error, "param", None)
    return body_for(path, status_of(error), code, message, param and _shortened(param)[:_QUOTED], accept)


def body_for(
    path: str, status: int, code: str, message: str, param: str | None = None, accept: str = ""
) -> tuple[bytes, str]:
    """The body and its content type: the Open Inference Protocol's error object on ``/v2``, an RFC 9457 problem
    elsewhere, a page for a browser. ``code`` is stable, machines match on it.

    ``accept``: the request's header of this name.
    """
    title = HTTPStatus(status).phrase
    if is_browser(accept):
        root = "../" * (path.count("/") - 1) or "./"  # the link home is relative to the request's path
        page = _error_template().render(root=root, status=status, title=title, code=code, message=message)
        return page.encode(), "text/html; charset=utf-8"
    if path == "/v2" or path.startswith("/v2/"):
        return orjson.dumps({"error": message}), "application/json"
    problem: dict[str, Any] = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": message,
        "code": code,
        # OpenAI's clients read and show only ``error``, so it repeats the message and the code.
        "error": {"message": message, "type": code, "code": code, "param": param},
    }
    return orjson.dumps(problem), "application/problem+json"


@cache
def _error_template() -> Any:
    from ...exporters.report.page import (
        pages_of,
    )  # brings jinja2: 7 MB that a server without browsers never needs

    return pages_of(Path(__file__).parent).get_template("error.html")


def is_browser(accept: str) -> bool:
    """True where an Accept header asks for a page first. Java's own client says ``text/html, image/gif, image/jpeg, *;
    q=.2`` of every request, and wants none: no browser writes ``*`` alone."""
    kinds = [item.partition(";")[0].strip().lower() for item in accept.split(",")]
    if "text/html" not in kinds or "*" in kinds:
        return False
    json_kinds = [
        kinds.index(kind) for kind in ("application/json", "application/problem+json") if kind in kinds
    ]
    return all(kinds.index("text/html") < place for place in json_kinds)
