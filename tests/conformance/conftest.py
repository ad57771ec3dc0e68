"""The real server as its users start it, a process of its own, with Triton's test models active."""

import itertools
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from halfeven.models.store.store import Store

from tests.conformance.hosted import MODELS, host
from tests.kept import kept_store
from tests.patience import PATIENCE_S
from tests.server_process import serve_command, server_environment, settle

LIMIT = 2**20  # bytes: the smallest limit that a server can be started with
BODY_SECONDS = 3
COUNTING = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
ONES = {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
SIMPLE = "/v2/models/simple/infer"
PENDING = 'nv_inference_pending_request_count{model="onnx_zero_1_float32_queue",version="1"}'


def pytest_itemcollected(item: pytest.Item) -> None:
    """One process runs the tests of the shared server: else each worker starts one with all of its models."""
    if "serving" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.together("conformance"))


@dataclass(frozen=True)
class Serving:
    """A running server: its process, and ``host:port`` of HTTP and of gRPC (empty where it speaks none)."""

    address: str
    process: subprocess.Popen[str]
    grpc: str = ""

    @property
    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) * 1024

    def leaked_bytes(self, work: Callable[[], object]) -> int:
        """The least that memory grew by in five repetitions of work.

        What a server makes once (an import, another form that it measures) falls into some repetition or other; a
        leak is in all of them.
        """
        resident = [(work(), self.resident_bytes)[1] for _ in range(6)]
        return min(after - before for before, after in itertools.pairwise(resident))

    def client(self) -> httpx.Client:
        # No TLS here, so none is prepared: that would take longer than most of these tests.
        return httpx.Client(base_url=f"http://{self.address}", timeout=PATIENCE_S, verify=False)


@contextmanager
def served(store: Path, names: Sequence[str], **settings: Any) -> Iterator[Serving]:
    """``halfeven serve`` on a free port, entered when every model named is active. Settings as HALFEVEN_…"""
    with launched(store, names, **settings) as server:
        yield server
        assert server.process.poll() is None, "the server did not live through its tests"


@contextmanager
def launched(store: Path, names: Sequence[str], **settings: Any) -> Iterator[Serving]:
    """``halfeven serve`` as `served` starts it, for a test that may end the server itself."""
    process = subprocess.Popen(
        serve_command(store),
        env=server_environment(server_name="triton", **settings),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stderr is not None
        address, grpc = _addresses(process.stderr, set(names))
        reader = threading.Thread(target=process.stderr.read)  # or the pipe fills up
        reader.start()
        try:
            yield Serving(address, process, grpc)
        finally:
            process.terminate()
            reader.join(PATIENCE_S)


def _addresses(lines: IO[str], missing: set[str]) -> tuple[str, str]:
    """Read what the server says until it has said everything that was waited for."""
    address, grpc, said = "", "", []
    for line in lines:
        said.append(line)
        if " listens for gRPC on " in line:
            grpc = line.split(" on ")[1].strip()
        if " listens on http://" in line:
            address = line.split("http://")[1].strip()
        missing.discard(line.split("@")[0])
        if address and not missing:
            return address, grpc
    raise AssertionError(f"the server ended before {sorted(missing)} were active:\n{''.join(said)}")


@pytest.fixture(scope="session")
def hosted() -> Path:
    """A store with every model of `hosted.MODELS`, to be copied."""

    def make(folder: Path) -> None:
        store = Store(folder / "store")
        host(store, folder / "models", MODELS)
        settle(store)

    return kept_store(__file__, make) / "store"


@pytest.fixture(scope="session")
def serving(hosted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The server that all tests share, with small limits."""
    store = shutil.copytree(hosted, tmp_path_factory.mktemp("shared") / "store")
    with served(store, list(MODELS), max_body_mib=1, body_seconds=BODY_SECONDS, grpc_port=0) as server:
        yield server


@pytest.fixture
def http(serving: Serving) -> Iterator[httpx.Client]:
    with serving.client() as client:
        yield client


@pytest.fixture(autouse=True)
def bystander(request: pytest.FixtureRequest) -> Iterator[None]:
    """A valid request of another caller is answered rightly after every test on a server."""
    yield
    if "serving" in request.fixturenames:
        with request.getfixturevalue("serving").client() as client:
            answers_right(client)


def answers_right(client: httpx.Client) -> None:
    answer = client.post(SIMPLE, content=json.dumps({"inputs": [COUNTING, ONES]}))
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    assert outputs == {"OUTPUT0": list(range(1, 17)), "OUTPUT1": list(range(-1, 15))}


def error_of(answer: httpx.Response) -> str:
    """The words of a refusal, which is an error object of the protocol and nothing else."""
    assert list(answer.json()) == ["error"], answer.text
    assert answer.json()["error"], "a refusal has words"
    return answer.json()["error"]


def seen_waiting(begin: Callable[[], Future[Any]], http: httpx.Client) -> Future[Any]:
    """A request that waits for a second one, which it does for two seconds: a busy machine may need some tries."""
    answers: list[Any] = []
    while len(answers) < 5:
        waiting = begin()
        while not waiting.done():
            if f"{PENDING} 1" in http.get("/metrics").text:
                return waiting
        answers.append(waiting.result())
    raise AssertionError(f"no request was seen waiting; their answers: {answers}")
