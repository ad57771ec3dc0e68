"""A V2 server with a fault of its own."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def odd(
    answers: dict[str, Any], needs: tuple[str, str] | None = None
) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server with these answers by path: a body, or (status, headers, body); also gives what it was asked."""
    asked: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked.append((self.path, body))
            said = answers.get(self.path, (404, {}, b"no such path"))
            if needs and self.headers.get(needs[0]) != needs[1]:
                said = (401, {}, b"no key")
            said = said(body) if callable(said) else said
            status, headers, content = said if isinstance(said, tuple) else (200, {}, said)
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
