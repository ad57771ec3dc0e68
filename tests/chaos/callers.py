"""Callers that ask all the time while faults are injected: each request is answered rightly, once, or refused."""

import http.client
import json
import threading
from collections import Counter
from typing import Any

import numpy as np

from tests.chaos.servers import Server
from tests.patience import PATIENCE_S

FIELDS = [{"name": "x", "shape": [1, 4], "datatype": "FP32"}]
TOLERANCE = 0.02  # between the half and the original


def infer(server: Server, name: str, row: list[float]) -> tuple[int, dict[str, str], Any]:
    """(status, headers, outputs or words of the refusal). Raises OSError or HTTPException without a whole answer."""
    body = json.dumps({"inputs": [{**FIELDS[0], "data": row}]})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", f"/v2/models/{name}/infer", body)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        headers = {key.lower(): value for key, value in answer.getheaders()}
        return answer.status, headers, found["outputs"][0]["data"] if answer.status == 200 else found["error"]
    finally:
        connection.close()


def is_right(outputs: list[float], expected: list[float]) -> bool:
    return bool(np.allclose(outputs, expected, atol=TOLERANCE))


class Callers:
    """Two threads that ask one server until `end`. A request may go without an answer only after `may_die`."""

    def __init__(self, server: Server, rows: dict[str, tuple[list[float], list[float]]]) -> None:
        self._server, self._rows = server, rows
        self._over, self._may_die = threading.Event(), threading.Event()
        self.faults, self.statuses, self.lost = list[str](), Counter[int](), 0
        self._threads = [threading.Thread(target=self._ask, args=(name,)) for name in rows]
        for thread in self._threads:
            thread.start()

    def may_die(self) -> None:
        self._may_die.set()

    def end(self) -> list[str]:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self.faults

    def _ask(self, name: str) -> None:
        row, expected = self._rows[name]
        while not self._over.wait(0.003):
            try:
                status, _, found = infer(self._server, name, row)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if self._may_die.is_set():
                    self.lost += 1
                    return
                self.faults.append(f"a request to {name} got no answer: {error!r}")
                continue
            self.statuses[status] += 1
            if status == 200 and not is_right(found, expected):
                self.faults.append(f"{name} answered {found}, expected {expected}")
            if status not in (200, 503) or not found:
                self.faults.append(f"{name} answered {status}: {found}")
