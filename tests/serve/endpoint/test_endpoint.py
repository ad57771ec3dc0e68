"""`halfeven.Endpoint`: a real server with the operator's code in its process, asked by real requests."""

import asyncio
import gc
import importlib.util
import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import halfeven as he
import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from halfeven.models.errors import (
    BadRequest,
    BadSetting,
    EndpointFailed,
    EndpointTimedOut,
    NotReady,
    Overloaded,
    TooLarge,
)
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.endpoint.endpoint_process import EndpointProcess, started
from halfeven.serve.endpoint.operator_code import _preprocess
from halfeven.serve.http.caller import CallerLeft, lend
from halfeven.serve.http.limits.memory_budget import FREE_BYTES, MemoryBudget
from halfeven.serve.http.limits.shared_places import SharedPlaces
from halfeven.serve.http.routes.infer import SMALL_JSON
from halfeven.serve.http.routes.predict import add_endpoints
from halfeven.serve.python_api.serving import _place_of
from torch import nn

from tests.patience import PATIENCE_S, until

X = {"x": "FP32"}
CODE = """
import os, sys
import halfeven as he
import numpy as np
from halfeven.models.errors import BadRequest
from beside import FACTOR

GIVEN = {
    "nothing": None,
    "wide": np.zeros((1, 4)),
    "misnamed": {"z": np.zeros((1, 4), np.float32)},
    "ragged": [[1.0], [2.0, 3.0]],
}

class Detector(he.Endpoint):
    model = "detector"

    def preprocess(self, request):
        print("what the code prints is no message")
        if isinstance(request, bytes):
            request = {"values": [float(word) for word in request.split()]}
        if request == "refuse":
            raise BadRequest("expected values, got a word")
        if request == "crash":
            os.kill(os.getpid(), 11)
        if request == "lists":
            self.count = 4
            return [[1, 2.5, 3, 4]]
        if request == "fill":
            bytearray(3 << 30)
        if request == "leave":
            sys.exit(7)
        if isinstance(request, str) and request in GIVEN:
            return GIVEN[request]
        if request == "narrow":
            return np.zeros((1, 3), np.float32)
        self.count = len(request["values"])
        return np.array(request["values"], np.float32).reshape(-1, 4) * FACTOR

    def postprocess(self, outputs):
        if self.count == 8:
            return object()
        return outputs.tobytes() if self.count == 12 else {"count": self.count, "best": outputs.argmax(-1)}

class NoModel(he.Endpoint):
    pass

class Hanging(Detector):
    def preprocess(self, request):
        import signal
        signal.pause()

class Forking(Hanging):
    def preprocess(self, request):
        if not os.fork():  # it has all that its parent has, the connection too
            with open(request, "w") as given:
                given.write(str(os.getpid()))
        super().preprocess(request)

class Crashing(Detector):
    def preprocess(self, request):
        import subprocess
        with open(request, "w") as given:
            given.write(str(subprocess.Popen(["sleep", "10000"]).pid))
        os.kill(os.getpid(), 11)

class Reading(he.Endpoint):
    model = "detector"

    def preprocess(self, request):
        import subprocess
        read = subprocess.run(["cat"], capture_output=True, timeout=30).stdout
        return np.array([[len(read)]], np.float32)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operator")
    (folder / "endpoint.py").write_text(CODE)
    (folder / "beside.py").write_text("FACTOR = 2.0\n")
    return folder


def detector(name: str = "detector") -> he.Half:
    x = np.random.normal(size=(24, 4)).astype(np.float32)
    return he.convert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), samples={"x": x}, name=name)


@pytest.fixture(scope="module")
def half() -> Iterator[he.Half]:
    half = detector()
    yield half
    half.close()


@pytest.fixture(scope="module")
def server(half: he.Half, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[he.Client]:
    store = tmp_path_factory.mktemp("store")
    half.save(store)
    with he.serve(store, port=0, endpoint=f"{folder / 'endpoint.py'}:Detector") as running:
        yield he.Client(running.url)


def call(
    url: str, body: Any, name: str = "detector", key: str = "", kind: str = ""
) -> tuple[int, bytes, str]:
    """The status, the body and the content type. Bytes are sent as such, all else as JSON. ``kind``: said of it."""
    is_json = not isinstance(body, bytes)
    headers = {
        "Content-Type": kind or ("application/json" if is_json else "text/plain"),
        "Authorization": f"Bearer {key}",
    }
    request = urllib.request.Request(
        f"{url}/v1/models/{name}:endpoint",
        json.dumps(body).encode() if is_json else body,
        headers if key else {"Content-Type": headers["Content-Type"]},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read(), answer.headers["content-type"]
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers["content-type"]


def refused(url: str, body: Any, **more: str) -> tuple[int, str, str]:
    status, answer, _ = call(url, body, **more)
    said = json.loads(answer)
    return status, said["code"], said["detail"]


def test_a_request_goes_through_the_code_and_the_model_and_back(server: he.Client, half: he.Half) -> None:
    values = np.random.normal(size=(1, 4)).astype(np.float32)
    status, answer, kind = call(server.url, {"values": values.ravel().tolist()})
    assert (status, kind) == (200, "application/json")
    expected = half(values * np.float32(2))
    assert json.loads(answer) == {"count": 4, "best": expected.argmax(-1).tolist()}
    text = " ".join(map(repr, [*values.ravel().tolist()] * 3)).encode()
    status, answer, kind = call(server.url, text)
    assert (status, kind) == (200, "application/octet-stream")
    np.testing.assert_array_equal(
        np.frombuffer(answer, np.float32).reshape(3, 3), half(np.repeat(values, 3, 0) * np.float32(2))
    )


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("Application/JSON; charset=utf-8", b'{"values": [1, 2, 3, 4]}'),
        ("application/vnd.values+json", b'{"values": [1, 2, 3, 4]}'),
        ("application/x-notjson", b"1 2 3 4"),
    ],
)
def test_the_code_gets_json_where_the_content_type_is_json_and_else_bytes(
    server: he.Client, kind: str, body: bytes
) -> None:
    assert json.loads(call(server.url, body, kind=kind)[1])["count"] == 4


def test_lists_of_numbers_are_an_array_of_the_model_s_datatype(server: he.Client) -> None:
    status, answer, _ = call(server.url, "lists")
    assert status == 200 and json.loads(answer)["count"] == 4


def test_many_at_once_keep_what_is_theirs(server: he.Client) -> None:
    def one(rows: int) -> int:
        values = np.random.normal(size=rows * 4).tolist()
        answer = json.loads(call(server.url, {"values": values})[1])
        assert len(answer["best"]) == rows
        return answer["count"]

    rows = [1, 4, 5, 6] * 6
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, rows)) == [4 * count for count in rows]


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ("refuse", 400, "bad_request", "expected values, got a word"),
        (
            {"nothing": 1},
            500,
            "endpoint_failed",
            "preprocess raised KeyError: 'values' (endpoint.py, line 37)",
        ),
        ({"values": [1.0] * 8}, 500, "endpoint_failed", "postprocess raised TypeError"),
        ("narrow", 400, "bad_request", "expected"),
        (
            "nothing",
            500,
            "endpoint_failed",
            "Detector: preprocess raised TypeError: it gave None for the input",
        ),
        ("wide", 500, "endpoint_failed", "it gave FP64 for the input 'x': expected an array of FP32"),
        ("misnamed", 500, "endpoint_failed", "it gave the inputs ['z']: expected ['x']"),
        ("ragged", 500, "endpoint_failed", "it gave lists that are no array: input 'x'"),
        ("crash", 500, "endpoint_failed", "signal SIGSEGV"),
        ("fill", 500, "endpoint_failed", "preprocess raised MemoryError"),
        ("leave", 500, "endpoint_failed", "exit code 7"),
    ],
)
def test_what_fails_is_said_in_a_sentence_and_the_next_request_is_answered(
    server: he.Client, body: Any, status: int, code: str, words: str
) -> None:
    found = refused(server.url, body)
    assert found[:2] == (status, code) and words in found[2]
    assert "Traceback" not in found[2] and "/" not in found[2]
    assert call(server.url, {"values": [1.0] * 4})[0] == 200


@pytest.mark.parametrize(
    "body", ['["a"]', '{"y": [1]}', "null", "[[1], [1, 2]]", '"x"', "true", '{"x": {"z": 1}}', "{}", b"bytes"]
)
def test_a_request_that_no_code_has_touched_and_does_not_fit_is_the_caller_s_fault(body: str | bytes) -> None:
    class Behind(he.Endpoint):
        def postprocess(self, outputs: Any) -> Any: ...

    class Before(he.Endpoint):
        def preprocess(self, request: Any) -> Any:
            return request

    head = {"id": 0, "json": isinstance(body, str), "inputs": X}
    sent = body.encode() if isinstance(body, str) else body
    with pytest.raises(BadRequest, match="the request goes to the model unchanged, and it gave"):
        _preprocess(Behind(), {}, head, sent)
    with pytest.raises(TypeError, match="it gave"):
        _preprocess(Before(), {}, head, sent)


def test_the_traceback_of_the_code_is_an_error_of_the_log(
    server: he.Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert refused(server.url, {"nothing": 1})[0] == 500
    (record,) = [one for one in caplog.records if one.name == "halfeven.endpoint"]
    assert (
        record.levelname == "ERROR" and "Detector failed: preprocess raised KeyError" in record.getMessage()
    )
    assert "endpoint.py" in str(record.exc_info) and "Traceback" in str(record.exc_info)


def test_a_body_that_is_no_json_a_model_without_endpoint_and_get_are_refused(server: he.Client) -> None:
    request = urllib.request.Request(
        f"{server.url}/v1/models/detector:endpoint", b"{", {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request)
    with refusal.value as answer:
        assert answer.code == 400 and "JSON" in answer.read().decode()
    assert refused(server.url, {}, name="otter")[:2] == (404, "not_found")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"{server.url}/v1/models/detector:endpoint")


@pytest.mark.slow(seconds=10)
def test_another_version_takes_over_between_two_requests(half: he.Half, folder: Path, tmp_path: Path) -> None:
    second = detector()
    half.save(tmp_path)
    x = np.random.normal(size=(16, 4)).astype(np.float32)
    KeyFile(tmp_path / "keys").add("other", ["manage"])
    key, _ = KeyFile(tmp_path / "keys").add("mine", ["infer", "manage"])
    place = f"{folder / 'endpoint.py'}:Detector"
    with he.serve(tmp_path, port=0, endpoint=place, key_file=tmp_path / "keys") as running:
        assert refused(running.url, {"values": [1.0] * 4})[:2] == (401, "unauthenticated")
        client = he.Client(running.url, key=key)
        answers = set[str]()

        def ask(_: int) -> None:
            status, answer, _kind = call(running.url, {"values": x.ravel().tolist()}, key=key)
            assert status == 200
            answers.add(str(json.loads(answer)["best"]))

        with ThreadPoolExecutor(4) as pool:
            asked = pool.map(ask, range(40))
            second.save(tmp_path)
            list(asked)
            while client.predict("detector", x).tolist() != second(x).tolist():
                pass
        ask(0)
        wanted = {str((each(x * np.float32(2))).argmax(-1).tolist()) for each in (half, second)}
        assert answers <= wanted


def test_the_code_of_the_page_is_an_endpoint(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/endpoint.md").read_text()
    (tmp_path / "detector.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    process = EndpointProcess(f"{tmp_path / 'detector.py'}:Detector", 10.0, 0)
    try:
        assert process.model == "detector"
        number, tensors, head_length = asyncio.run(process.preprocess(b'{"values": [1, 2, 3, 4]}', True, X))
        head = json.loads(tensors[: int(head_length)])
        assert (number, head["inputs"][0]["name"], head["inputs"][0]["shape"]) == (0, "x", [1, 4])
    finally:
        process.close()


class AtOnce:
    """A timer that is over as soon as it is started."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._work = work

    def start(self) -> None:
        self._work()

    def cancel(self) -> None: ...


def test_a_call_that_hangs_is_ended_and_says_which_setting_allows_more(folder: Path) -> None:

    process = EndpointProcess(f"{folder / 'endpoint.py'}:Hanging", 10.0, 0)
    try:
        process._timer = AtOnce  # type: ignore[assignment]
        with pytest.raises(EndpointTimedOut, match=r"longer than 10 s.*HALFEVEN_ENDPOINT_SECONDS"):
            asyncio.run(process.preprocess(b"", False, X))
    finally:
        process.close()
    assert threading.active_count() < 50


class WhenForked:
    """A timer that is over when the code has started a process of its own, whose number comes through a pipe."""

    def __init__(self, pipe: Path, and_then: Callable[[], None] = lambda: None) -> None:
        os.mkfifo(pipe)
        self._pipe, self._and_then, self.child = pipe, and_then, 0
        self.has_forked = threading.Event()

    def __call__(self, seconds: float, work: Callable[[], None]) -> "WhenForked":
        self._work = work
        return self

    def start(self) -> None:
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.child = int(self._pipe.read_text())
        self.has_forked.set()
        self._work()

    def cancel(self) -> None: ...


@pytest.mark.parametrize("how", ["late", "closed"])
def test_a_process_of_the_code_that_has_the_connection_does_not_hold_the_server(
    folder: Path, tmp_path: Path, how: str
) -> None:
    process = EndpointProcess(f"{folder / 'endpoint.py'}:Forking", 10.0, 0)
    timer = WhenForked(tmp_path / "pipe")
    process._timer = timer if how == "late" else lambda *_: Never(timer)  # type: ignore[assignment]

    def ask() -> None:
        asyncio.run(process.preprocess(json.dumps(str(tmp_path / "pipe")).encode(), True, X))

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        assert timer.has_forked.wait(PATIENCE_S)
        closing = threading.Thread(target=process.close, daemon=True)
        try:
            if how == "closed":
                closing.start()
            with pytest.raises(EndpointTimedOut if how == "late" else EndpointFailed):
                asked.result(PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):
                os.kill(timer.child, signal.SIGKILL)
    if how == "late":
        closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


class Never:
    """A timer that is never over, beside one that tells when the code has started a process."""

    def __init__(self, given: WhenForked) -> None:
        given(0.0, lambda: None)
        self.start, self.cancel = given.start, given.cancel


def test_a_program_that_the_code_runs_ends_with_a_crash_of_the_code(folder: Path, tmp_path: Path) -> None:
    process = EndpointProcess(f"{folder / 'endpoint.py'}:Crashing", 10.0, 0)
    with pytest.raises(EndpointFailed, match="SIGSEGV"):
        asyncio.run(process.preprocess(json.dumps(str(tmp_path / "pid")).encode(), True, X))
    started = Path("/proc") / (tmp_path / "pid").read_text() / "cmdline"

    def is_gone() -> bool:
        try:
            return not started.read_bytes()  # nothing: it waits for its parent to look
        except OSError:
            return True

    until(is_gone)
    process.close()


def test_a_program_that_the_code_runs_does_not_read_the_messages(folder: Path) -> None:
    process = EndpointProcess(f"{folder / 'endpoint.py'}:Reading", 10.0, 0)
    try:
        _, tensors, length = asyncio.run(process.preprocess(b"", False, X))
        assert np.frombuffer(tensors[int(length) :], np.float32).tolist() == [0.0]
    finally:
        process.close()


@pytest.mark.slow
def test_what_began_in_an_earlier_process_is_to_be_sent_again_and_what_is_answered_is_taken(
    folder: Path,
) -> None:
    process = EndpointProcess(f"{folder / 'endpoint.py'}:Detector", 10.0, 0)

    def begin(request: Any) -> int:
        return asyncio.run(process.preprocess(json.dumps(request).encode(), True, X))[0]

    answered = b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}'
    try:
        first = begin({"values": [1.0] * 4})
        with pytest.raises(EndpointFailed):
            begin("crash")
        second = begin({"values": [1.0] * 4})
        with pytest.raises(NotReady, match="send the request again"):
            asyncio.run(process.postprocess(first, answered, None))
        _, answer = asyncio.run(process.postprocess(second, answered, None))
        assert json.loads(answer)["count"] == 4
        with pytest.raises(TooLarge, match="at most"):
            asyncio.run(process.preprocess(Long(), False, X))
    finally:
        process.close()


class Long(bytes):
    def __len__(self) -> int:
        return 2**28 + 1


def app_with(ask: Callable[..., Any], **process: Any) -> FastAPI:
    """An application with the endpoint `m`, whose process has these methods and places."""
    served, threads = SimpleNamespace(spec=SimpleNamespace(inputs=[])), SimpleNamespace(run=None)
    inference: Any = SimpleNamespace(find=lambda _: served, ask=ask, worker_threads=threads)
    endpoint: Any = SimpleNamespace(model="m", **process)
    app = FastAPI()
    add_endpoints(app, inference, {"m": endpoint}, 2**20, 10.0)
    return app


async def answered_at_once(*_: Any, **__: Any) -> Any:
    """An `Inference.ask` whose answer is there."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(
        SimpleNamespace(outputs=[], prepared=SimpleNamespace(version="1", digest=""), precision="")
    )
    codec = SimpleNamespace(write=lambda *_: SimpleNamespace(body=b"", header_length=None))
    return SimpleNamespace(future=future, codec=codec, request=None)


@pytest.mark.parametrize("where", ["places", "memory", "model", "postprocess"])
def test_a_request_that_ends_early_leaves_nothing_in_the_process(where: str) -> None:
    """``places``: so many requests as may be are under way, and this one is refused before the process has it."""
    forgotten: list[int] = []
    fault = Overloaded("too much")

    async def ask(*_: Any, **__: Any) -> Any:
        if where == "model":
            raise fault
        return await answered_at_once()

    async def preprocess(*_: Any) -> tuple[int, bytes, str]:
        return 7, bytes(2 * FREE_BYTES), "0"

    async def postprocess(*_: Any) -> Any:
        raise fault

    places = SharedPlaces(0 if where == "places" else 1, "requests are under way", "try again", 1.0)
    app = app_with(
        ask, places=places, preprocess=preprocess, postprocess=postprocess, forget=forgotten.append
    )

    async def with_lease(scope: Any, receive: Any, send: Any) -> None:
        lend(scope, MemoryBudget(0 if where == "memory" else 2**30))
        await app(scope, receive, send)

    async def post() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(with_lease), base_url="http://s"
        ) as client:
            await client.post("/v1/models/m:endpoint", content=b"x")

    with pytest.raises(TooLarge if where == "memory" else Overloaded):
        asyncio.run(post())
    assert forgotten == ([] if where == "places" else [7]) and places.count == 0


@pytest.mark.parametrize("where", ["preprocess", "postprocess"])
def test_a_call_of_a_caller_who_has_gone_is_cancelled(where: str) -> None:
    cancelled, gone = list[str](), asyncio.Event()

    async def call(name: str, answer: Any) -> Any:
        if name == where:
            gone.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.append(name)
        return answer

    places = SharedPlaces(1, "requests are under way", "try again", 1.0)
    app = app_with(
        answered_at_once,
        places=places,
        preprocess=lambda *_: call("preprocess", (7, b"", "0")),
        postprocess=lambda *_: call("postprocess", ("text/plain", b"")),
        forget=lambda _: None,
    )
    messages = [{"type": "http.request", "body": b"x", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    path = "/v1/models/m:endpoint"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}

    async def post() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await app(scope, receive, send)

    with pytest.raises(CallerLeft):
        asyncio.run(post())
    assert cancelled == [where] and places.count == 0


class Body(bytes):
    """An empty body by which one sees whether it is still held."""

    class Mark: ...

    alive: ClassVar = weakref.WeakSet[Mark]()

    def __init__(self) -> None:
        self.mark = self.Mark()
        self.alive.add(self.mark)


def test_a_call_that_is_cancelled_before_its_turn_is_not_run_and_a_running_one_is_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = EndpointProcess(f"{folder / 'endpoint.py'}:Detector", 10.0, 0)
    asked, done = list[Any](), list[Any]()
    begun, goes_on = threading.Event(), threading.Event()

    def run(head: Any, held: Any) -> Any:
        held.clear()
        asked.append(head["id"])
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        done.append(head["id"])
        return {"length": "0"}, b""

    monkeypatch.setattr(process, "_asked", run)
    monkeypatch.setattr(process, "_forget", lambda id: done.append(f"forget {id}"))

    async def several() -> None:
        calls = [asyncio.ensure_future(process.preprocess(Body(), False, X)) for _ in range(3)]
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        last = calls.pop()
        assert all(one.cancel() for one in calls)
        await asyncio.wait(calls)
        calls.clear()
        gc.collect()
        assert len(Body.alive) == 1, "only the body of the call that waits may still be in memory"
        goes_on.set()
        assert (await last)[0] == 2

    try:
        asyncio.run(several())
        process._thread.submit(lambda: None).result(PATIENCE_S)
        assert asked == [0, 2] and done == [0, 2, "forget 0", "forget 1"]
    finally:
        goes_on.set()
        process.close()
    process.forget(3)


def test_the_json_of_a_large_body_is_counted_in_a_thread(
    server: he.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()

    def counted(_: bytes) -> int:
        threads.append(threading.current_thread().name)
        return 0

    monkeypatch.setattr("halfeven.serve.http.routes.predict.json_bytes", counted)
    for more in ("", "x" * SMALL_JSON):
        assert call(server.url, {"values": [1.0] * 4, "more": more})[0] == 200
    assert [name.startswith("halfeven-predict") for name in threads] == [False, True]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("odd.py:Detector", "names no model"),
        ("endpoint.py:Nothing", "has no class Nothing"),
        ("endpoint.py:NoModel", "names no model"),
        ("beside.py:FACTOR", "halfeven.Endpoint"),
        ("none.py:Detector", "FILE.py:CLASS"),
        ("serve.sh:Detector", "expected FILE.py:CLASS"),
        ("endpoint.py", "FILE.py:CLASS"),
        ("broken.py:Detector", "broken.py, line 1"),
    ],
)
def test_what_cannot_be_an_endpoint_is_told_at_the_start(folder: Path, place: str, words: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "serve.sh").write_text("exec halfeven serve\n")
    (folder / "odd.py").write_text("import endpoint\nclass Detector(endpoint.Detector):\n    model = ['a']\n")
    with pytest.raises(BadSetting, match=words):
        started([str(folder / place)], 1.0, 512)


def test_two_for_one_model_and_a_class_of_a_script_are_refused(folder: Path, half: he.Half) -> None:
    place = f"{folder / 'endpoint.py'}:Detector"
    with pytest.raises(BadSetting, match="has the endpoint Detector already"):
        started([place, place], 1.0, 512)

    class Inside(he.Endpoint):
        model = "detector"

    with pytest.raises(BadSetting, match="a class of a file of its own"):
        he.serve(half, port=0, endpoint=Inside)
    assert _place_of(made(folder)) == f"{folder / 'endpoint.py'}:Detector"


def made(folder: Path) -> type[he.Endpoint]:
    """The class as a script imports it."""
    spec = importlib.util.spec_from_file_location("endpoint_of_a_script", folder / "endpoint.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["endpoint_of_a_script"] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
        del sys.modules["beside"]
    return module.Detector
