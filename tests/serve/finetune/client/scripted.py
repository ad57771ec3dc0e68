"""A server of fine-tuning routes that answers as a script says, and a clock for its client."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, object]
JOB = {"id": "ftjob-1", "model": "digits", "fine_tuned_model": None, "status": "queued", "error": None}


def state(status: str, stage: str = "training", **more: Any) -> Answer:
    progress = more.pop("progress", {})
    ours = {"stage": stage, "progress": progress, "gate": more.pop("gate", None), "summary": None}
    return 200, {**JOB, "status": status, "halfeven": {**ours, "parent_version": 1}, **more}


def succeeded() -> Answer:
    return state("succeeded", fine_tuned_model="digits@2")


@dataclass
class Script:
    """The answers of a server, and the requests that came to it. The last state is given for ever."""

    states: list[Answer] = field(default_factory=lambda: [state("queued"), succeeded()])
    upload: Answer = (200, {"id": "file-1", "object": "file"})
    creation: list[Answer] = field(default_factory=lambda: [state("queued")])
    cancelled: Answer = field(default_factory=lambda: state("cancelled"))
    asked: list[tuple[str, str, bytes, dict[str, str]]] = field(default_factory=list)
    reads_uploads: bool = True

    def answer(self, method: str, path: str) -> Answer:
        if path == "/v1/files":
            return self.upload
        if path.endswith("/cancel"):
            self.states = [self.cancelled]
            return state("running")
        queue = self.creation if method == "POST" else self.states
        return queue.pop(0) if len(queue) > 1 else queue[0]

    def bodies(self, method: str, path: str) -> list[bytes]:
        return [body for m, p, body, _ in self.asked if (m, p) == (method, path)]

    def headers(self, method: str, path: str) -> list[dict[str, str]]:
        return [headers for m, p, _, headers in self.asked if (m, p) == (method, path)]


@contextmanager
def speaking(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            reads = script.reads_uploads or self.path != "/v1/files"
            body = self.rfile.read(length) if reads else b""
            headers = {name.lower(): value for name, value in self.headers.items()}
            script.asked.append((self.command, self.path, body, headers))
            status, described = script.answer(self.command, self.path)
            if status == 0:
                return  # hangs up without a word
            text = described if isinstance(described, bytes) else json.dumps(described).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.headers["content-length"] = "0"
            self.do_POST()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(600)  # it ends at once


class Clock:
    """Time that passes only while somebody sleeps; ``on_sleep`` hears how often that was."""

    def __init__(self, on_sleep: Callable[[int], None] = lambda count: None) -> None:
        self.now, self.slept, self.on_sleep = 0.0, 0, on_sleep

    def sleep(self, seconds: float) -> None:
        self.now, self.slept = self.now + seconds, self.slept + 1
        self.on_sleep(self.slept)
