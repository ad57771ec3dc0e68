"""Callers of a server on this machine: real HTTP requests on kept-alive connections, every answer counted."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping

import numpy as np

from ..access.direct_requests import answer_to
from ..http.codecs.infer_client import HEADER_LENGTH, read_outputs, write_binary


class Caller:
    """One kept-alive connection that speaks V2 with binary tensors."""

    def __init__(self, port: int, model: str, timeout_s: float = 30.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._path = f"/v2/models/{model}/infer"

    def infer(self, arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Outputs by name, and our headers. Raises OSError, ValueError or BadInput for anything but a whole answer."""
        body, headers = write_binary(arrays)
        self._connection.request("POST", self._path, body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {content[:500].decode(errors='replace')}")
        found = {key.lower(): value for key, value in answer.headers.items()}
        return read_outputs(content, answer.headers[HEADER_LENGTH]), found

    def close(self) -> None:
        self._connection.close()


class BenchTraffic:
    """Requests of one sample each, sent by several threads for as long as the block lasts. Each thread waits for the
    answer and ``pause_s`` seconds more before its next request."""

    def __init__(
        self, port: int, model: str, arrays: Mapping[str, np.ndarray], connections: int, pause_s: float = 0.0
    ) -> None:
        self.answered = 0
        self.failed = 0
        self.faults: list[str] = []
        self.by_version: Counter[str] = Counter()
        self.seconds = 0.0
        self._port, self._model, self._arrays, self._pause_s = port, model, arrays, pause_s
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(i,)) for i in range(connections)]

    def __enter__(self) -> "BenchTraffic":
        self._began = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.seconds = time.perf_counter() - self._began

    def _call(self, first: int) -> None:
        caller = Caller(self._port, self._model)
        count = min(len(array) for array in self._arrays.values())
        row = first % count
        while not self._over.wait(self._pause_s):
            try:
                _, headers = caller.infer(
                    {name: array[row : row + 1] for name, array in self._arrays.items()}
                )
            except Exception as error:
                self._failed(f"{type(error).__name__}: {error}")
                caller.close()
                caller = Caller(self._port, self._model)
                continue
            row = (row + len(self._threads)) % count
            with self._lock:
                self.answered += 1
                self.by_version[headers["halfeven-version"]] += 1
        caller.close()

    def _failed(self, fault: str) -> None:
        with self._lock:
            self.failed += 1
            if len(self.faults) < 10:
                self.faults.append(fault)


def served_version(port: int, model: str) -> str | None:
    """The active version, as the server says it; None while it does not answer or has none."""
    try:
        answer = answer_to(f"http://127.0.0.1:{port}/v1/models", None, {}, 5.0)
        found = json.loads(answer.body)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    active = {one["name"]: one["version"] for one in found["models"]} if answer.status == 200 else {}
    return active.get(model)
