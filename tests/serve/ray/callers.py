"""Callers of a cluster through our client: each answer is held against the version that it names."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from halfeven.models.errors import HalfevenError, Overloaded
from halfeven.serve.access.direct_requests import ask

TOLERANCE = 0.01  # a half errs by some 0.0005 here; the versions lie 0.1 and more apart


class Expected(NamedTuple):
    net: torch.nn.Module
    digest: str


class Callers:
    """Threads that ask one thing after another, each with numbers and an id of its own.

    ``lost``: requests that were neither answered nor refused with a time to come again; ``wrong``: answers that are not
    those of the version that they name. ``newest``: by node, the version of its last answer.
    """

    def __init__(self, url: str, versions: Mapping[str, Expected]) -> None:
        self.url = url
        self.answered = self.refused = 0
        self.lost, self.wrong = list[str](), list[str]()
        self.by_node: Counter[str] = Counter()
        self.newest: dict[str, str] = {}
        self._versions = versions
        self._lock = threading.Lock()

    @property
    def asked(self) -> int:
        return self.answered + self.refused + len(self.lost)

    @contextmanager
    def calling(self, size: int) -> Iterator[None]:
        end = threading.Event()
        threads = [threading.Thread(target=self._call, args=(place, end)) for place in range(size)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            end.set()
            for thread in threads:
                thread.join()

    def _call(self, place: int, end: threading.Event) -> None:
        random = np.random.default_rng([place, self.asked])
        count = 0
        while not end.is_set():
            count += 1
            x = random.standard_normal(4).astype(np.float32)
            try:
                headers, answer = self._answer(f"{place}-{count}", x)
                faults = self._faults(f"{place}-{count}", x, headers, answer)
            except Overloaded:
                with self._lock:
                    self.refused += 1
            except HalfevenError as error:
                with self._lock:
                    self.lost.append(str(error))
            else:
                with self._lock:
                    self.answered += 1
                    self.by_node[headers["halfeven-node"]] += 1
                    self.newest[headers["halfeven-node"]] = headers["halfeven-version"]
                    self.wrong += faults

    def _answer(self, id: str, x: np.ndarray) -> tuple[Mapping[str, str], dict[str, Any]]:
        given = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": x.tolist()}
        body = json.dumps({"id": id, "inputs": [given]}).encode()
        headers, answer = ask(f"{self.url}/v2/models/net/infer", body, "application/json")
        return headers, json.loads(answer)

    def _faults(
        self, id: str, x: np.ndarray, headers: Mapping[str, str], answer: dict[str, Any]
    ) -> list[str]:
        version = headers["halfeven-version"]
        expected = self._versions[version]
        with torch.inference_mode():
            y = expected.net(torch.from_numpy(x)).numpy()
        found = np.array(answer["outputs"][0]["data"], np.float32)
        named = (
            answer["id"],
            answer["model_version"],
            headers["halfeven-digest"],
            headers["halfeven-precision"],
        )
        if named != (id, version, expected.digest, "fp16"):
            return [f"{id} for version {version}: {named}"]
        return (
            []
            if np.abs(found - y).max() < TOLERANCE
            else [f"{id}: version {version} gives {y}, it says {found}"]
        )
