"""The client commands ask the server that they are told and nobody else, and send it their key alone."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from halfeven.models.errors import BadInput
from halfeven.serve.access.direct_requests import answer_to, ask
from halfeven.serve.bench.benched_model import ask as ask_for_bench
from halfeven.serve.finetune.client.remote import Remote


class Redirecting(BaseHTTPRequestHandler):
    """A server that sends every request on to ``/elsewhere`` of itself, and remembers what was asked."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(f"{self.path} {self.headers.get('authorization')}")
        elsewhere = self.path.endswith("/elsewhere")
        self.send_response(200 if elsewhere else 302)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    serving = HTTPServer(("127.0.0.1", 0), type("Here", (Redirecting,), {"asked": asked}))
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}", asked
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_no_redirect_is_followed_with_the_key(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = server
    monkeypatch.setenv("HALFEVEN_API_KEY", "hek_secret")
    with pytest.raises(BadInput, match="sends on to /elsewhere"):
        ask(f"{url}/v2/models/net", None)
    with pytest.raises(BadInput, match="answers 302"):
        ask_for_bench(f"{url}/v2/models/net", {"Authorization": "Bearer hek_secret"})
    with pytest.raises(BadInput, match="sends on to /elsewhere"):
        Remote(url).job("x")
    job = "/v1/fine_tuning/jobs/x Bearer hek_secret"
    assert asked == [*["/v2/models/net Bearer hek_secret"] * 2, job]


def test_a_server_on_this_machine_is_asked_without_the_proxy_of_the_environment(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = server
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert answer_to(f"{url}/elsewhere", None, {}, 20).status == 200
    assert answer_to(url.replace("127.0.0.1", "localhost"), None, {}, 20).status == 302
    assert len(asked) == 2
