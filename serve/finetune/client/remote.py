"""A client of the fine-tuning routes of a running server."""

import http.client
import json
import os
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ....models.errors import BadInput, CannotServe
from ....models.files.opened_file import opened_named
from ...access.client_key import key_headers
from ...access.direct_requests import answer_to, error_of_status, is_server_url, no_answer, sent_on

JOBS = "/v1/fine_tuning/jobs"
_CHUNK = 2**20
_LONGEST_ANSWER = 2**24  # ten thousand steps of a training with several optimizers are 4 MB
# The server ends a trial before, and the reading of a job's files; three more trainers take so much longer.
_TRIAL_TIMEOUT_S, _COMPARING_S = 1500.0, 1800.0

Sent = Callable[[int, int], None]


class Remote:
    """One server by its URL. A connection per call: a job outlives any of them.

    Every call raises `error_of_status`, with the server's own words, where the server refuses or fails; NotReady where
    no server answers. ``timeout_s`` bounds each wait on the wire, ``slow_timeout_s`` those for which the server
    keeps a whole file. ``key``: as `key_headers`.
    """

    def __init__(
        self, url: str, timeout_s: float = 10.0, slow_timeout_s: float = 120.0, key: str | None = None
    ) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._place = _place_of(self.url)
        self._timeout_s, self._slow_timeout_s = timeout_s, slow_timeout_s

    def job(self, id: str) -> dict[str, Any]:
        return self._call("GET", _job_path(id))

    def steps(self, id: str, most: int) -> list[dict[str, Any]]:
        """The log of a job's steps; of more than ``most`` every k-th."""
        return self._call("GET", f"{_job_path(id)}/metrics?most={most}")["data"]

    def checkpoints(self, id: str) -> list[dict[str, Any]]:
        """The evaluations of a job, the newest first."""
        found: list[dict[str, Any]] = []
        while True:
            after = f"&after={urllib.parse.quote(found[-1]['id'], safe='')}" if found else ""
            page = self._call("GET", f"{_job_path(id)}/checkpoints?limit=1000{after}")
            found += page["data"]
            if not page["has_more"]:
                return found

    def cancel(self, id: str) -> dict[str, Any]:
        return self._call("POST", f"{_job_path(id)}/cancel", b"")

    def create(self, request: Mapping[str, Any], idempotency_key: str) -> dict[str, Any]:
        """The job made from ``request``; sent again with the same key, the same job."""
        headers, body = {"idempotency-key": idempotency_key}, json.dumps(request).encode()
        may_be = "the job may still be created: `halfeven jobs` lists it"
        return self._call("POST", JOBS, body, headers, _TRIAL_TIMEOUT_S, may_be=may_be)

    def validate(self, request: Mapping[str, Any], compare: bool = False) -> dict[str, Any]:
        """Ask the server to check a job request and to train two steps of it; no job is created. ``compare``: a few
        steps in each precision, too."""
        path, body = f"{JOBS}/validate" + ("?compare=true" if compare else ""), json.dumps(request).encode()
        return self._call("POST", path, body, timeout_s=_TRIAL_TIMEOUT_S + _COMPARING_S * compare)

    def active_version(self, model: str) -> int | None:
        """The number of the version of ``model`` that is active; None where none is."""
        return self._call("GET", f"/v1/models/{urllib.parse.quote(model, safe='')}").get("live")

    def rollback(self, model: str) -> dict[str, Any]:
        """Make the version before the active one active; gives its facts."""
        return self._call("POST", f"/v1/models/{urllib.parse.quote(model, safe='')}/rollback", b"{}")

    def delete_file(self, id: str) -> dict[str, Any]:
        return self._call("DELETE", f"/v1/files/{urllib.parse.quote(id, safe='')}")

    def upload(self, file: Path, sent: Sent = lambda done, total: None) -> dict[str, Any]:
        """The file object of ``file``, streamed in chunks. ``sent`` is called with (bytes sent, bytes in all)."""
        try:
            with opened_named(file) as opened:
                stream = opened.handle
                size = os.fstat(stream.fileno()).st_size
                head, tail, kind = _envelope(file.name)
                headers = {"content-type": kind, "content-length": str(len(head) + size + len(tail))}
                body = _chunks(stream, size, head, tail, lambda done: sent(done, size))
                return self._call("POST", "/v1/files", body, headers, self._slow_timeout_s)
        except FileNotFoundError:
            raise BadInput(f"{file}: there is no such file") from None
        except PermissionError:
            raise BadInput(f"{file} may not be read by this user") from None
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}; expected one file of rows") from None

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        may_be: str = "",
    ) -> dict[str, Any]:
        timeout_s = timeout_s or self._timeout_s
        sent = {"content-type": "application/json", **key_headers(self._key), **(headers or {})}
        try:
            answer = answer_to(self._place + path, body, sent, timeout_s, _bounded, method)
        except (OSError, http.client.HTTPException) as error:
            raise no_answer(self.url + path, error, timeout_s, may_be) from None
        if 300 <= answer.status < 400:
            raise sent_on(answer)
        return _read(answer.status, answer.body)


def _bounded(answer: http.client.HTTPResponse) -> bytes:
    return answer.read(_LONGEST_ANSWER + 1)


def _place_of(url: str) -> str:
    """The URL as requests have it. Raises BadInput for one that is none of a server."""
    parts = urllib.parse.urlsplit(url) if is_server_url(url) else None
    if parts is None or parts.query or parts.fragment:
        raise BadInput(f"--url: expected http://HOST:PORT or https://HOST:PORT, got {url[:80]!r}")
    host = parts.netloc.rpartition("@")[2]  # urllib would look for a host with the user's name before it
    return parts._replace(netloc=host, path=urllib.parse.quote(parts.path, safe="/%")).geturl()


def _job_path(id: str) -> str:
    return f"{JOBS}/{urllib.parse.quote(id, safe='')}"


def _envelope(name: str) -> tuple[bytes, bytes, str]:
    """The bytes before and after the file's (RFC 7578), and the body's content type."""
    boundary = f"halfeven-{uuid.uuid4().hex}"
    quoted = name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
    head = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{quoted}"\r\n'
        "content-type: application/octet-stream\r\n\r\n"
    )
    tail = f"\r\n--{boundary}--\r\n"
    kind = f"multipart/form-data; boundary={boundary}"
    return head.encode(errors="replace"), tail.encode(), kind


def _chunks(
    stream: BinaryIO, size: int, head: bytes, tail: bytes, sent: Callable[[int], None]
) -> Iterator[bytes]:
    yield head
    done = 0
    while done < size:
        chunk = stream.read(min(_CHUNK, size - done))
        if not chunk:
            raise BadInput(f"the file became shorter while it was sent: {done} of {size} bytes are left")
        yield chunk
        done += len(chunk)
        sent(done)
    yield tail


def _read(status: int, body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body[:_LONGEST_ANSWER])
    except ValueError:
        answer = None
    if not 200 <= status < 300:
        raise error_of_status(status, body)
    if not isinstance(answer, dict):
        raise CannotServe(f"expected a JSON object, got {body[:80]!r}; is this a halfeven server?")
    return answer
