"""A server with pages: versions that load at once, and a browser's way to ask."""

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any, NamedTuple

from halfeven.serve.versions.traffic.recent import Bin

from tests.patience import PATIENCE_S
from tests.serve.versions.traffic.conftest import store as store
from tests.serve.versions.traffic.conftest import versions as versions

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


class Shown(NamedTuple):
    status: int
    headers: Any
    text: str


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def browse(
    address: str, path: str, form: Mapping[str, str] | bytes | None = None, key: str = "", **headers: str
) -> Shown:
    """A page as a browser asks for it; ``form``: sent from a page of the server's own."""
    sent = {"accept": BROWSER} | ({"authorization": f"Bearer {key}"} if key else {})
    body = None
    if form is not None:
        body = form if isinstance(form, bytes) else urllib.parse.urlencode(form).encode()
        sent |= {"origin": f"http://{address}", "sec-fetch-site": "same-origin"}
    sent = {name: value for name, value in (sent | headers).items() if value}
    request = urllib.request.Request(f"http://{address}{path}", body, sent)
    try:
        answer: Any = urllib.request.build_opener(_Stay).open(request, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        answer = error
    return Shown(answer.status, answer.headers, answer.read().decode())


def typed(*parts: bytes) -> tuple[bytes, str]:
    """The form of a model's page, filled in: body and content type."""
    fields = (
        b'--b\r\nContent-Disposition: form-data; name="input-%d"\r\n\r\n%b\r\n' % pair
        for pair in enumerate(parts)
    )
    return b"".join(fields) + b"--b--\r\n", "multipart/form-data; boundary=b"


def busy(index: int) -> Bin:
    """A bin of requests, each one another."""
    buckets = [0] * len(Bin().buckets)
    buckets[5 + index % 7] = 11 + index
    return Bin(11 + index, index % 2, tuple(buckets))


class Tags(HTMLParser):
    """Every tag with its attributes, and the words that a reader sees, one space between two."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._said: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self._said).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] != "style":
            self._said.append(data)

    def links(self) -> set[str]:
        return {str(more["href"]) for tag, more in self.tags if tag == "a" and more.get("href")}
