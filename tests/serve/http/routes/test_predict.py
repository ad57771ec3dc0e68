"""``:predict`` over a real server: every kind of body and answer, and nobody waits for somebody else's picture."""

import asyncio
import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from halfeven.models.errors import Overloaded
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.http.inference import WorkerThreads
from halfeven.serve.http.routes import predict as predict_routes
from halfeven.serve.http.routes.app import build_app
from PIL import Image

from tests.patience import PATIENCE_S
from tests.serve.conftest import HISTORY, FakeRoster, FakeServed, running
from tests.serve.http.bodies import npy, npz, png
from tests.specs import tensor

ENTRY = {"size": [4, 4], "color": "L", "scale": 1 / 16}
PAINT = {"color": "L", "scale": 1 / 255}
SEEING = ModelSpec(
    "seeing", (tensor("image", "FP32", -1, 1, 4, 4, picture=ENTRY),), (tensor("sum", "FP32", -1),), 8
)
PAINTING = ModelSpec(
    "painting",
    (tensor("image", "FP32", -1, 1, 4, 4, picture=ENTRY),),
    (tensor("painted", "FP32", -1, 1, 4, 4, kind="image", picture=PAINT),),
    8,
)
WIDE = ModelSpec("wide", (tensor("x", "FP32", -1, 40_000),), (tensor("sum", "FP32", -1),), 8)


def summed(x: np.ndarray) -> list[np.ndarray]:
    return [x.reshape(len(x), -1).sum(1, dtype=np.float32)]


@pytest.fixture(scope="module")
def whole() -> Iterator[tuple[FakeRoster, str]]:
    """A server that takes bodies up to 1 MiB."""
    roster = FakeRoster({})
    with running(build_app(roster, lambda: b"", HISTORY, max_body_bytes=2**20)) as address:
        yield roster, address


@pytest.fixture
def models(whole: tuple[FakeRoster, str], roster: FakeRoster) -> FakeRoster:
    """The served models, as new."""
    prepared = roster.models["double"].prepared
    computing = ((SEEING, summed), (PAINTING, lambda x: [x / 4]), (WIDE, summed))
    whole[0].models = roster.models | {s.name: FakeServed(s, compute, prepared) for s, compute in computing}
    return whole[0]


@pytest.fixture
def http(whole: tuple[FakeRoster, str], models: FakeRoster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{whole[1]}", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def grey() -> np.ndarray:
    return np.random.default_rng().integers(0, 17, (2, 4, 4), np.uint8)


def predict(http: httpx.Client, model: str, accept: str = "*/*", **more: Any) -> httpx.Response:
    return http.post(f"/v1/models/{model}:predict", headers={"accept": accept}, **more)


def test_pictures_are_answered_raw_in_forms_and_in_json(http: httpx.Client, grey: np.ndarray) -> None:
    wanted = (grey / 16).sum((1, 2)).tolist()
    files = [png(pixels) for pixels in grey]
    assert predict(http, "seeing", content=files[0]).json() == {"predictions": wanted[:1]}
    form = predict(http, "seeing", files=[("file", ("a.png", data)) for data in files])
    assert form.json() == {"predictions": wanted} and form.headers["halfeven-precision"] == "fp16"
    instances = [{"b64": base64.b64encode(data).decode()} for data in files]
    assert predict(http, "seeing", json={"instances": instances}).json() == {"predictions": wanted}
    assert (
        http.post("/v1/models/seeing/versions/3:predict", content=files[1]).json()["predictions"]
        == wanted[1:]
    )


def test_a_painted_picture_is_a_png_and_several_are_base64(http: httpx.Client, grey: np.ndarray) -> None:
    # pixel / 16 through the model is pixel / 64; a PNG's pixel is that · 255.
    wanted = np.rint(grey / 64 * 255).astype(np.uint8)
    one = predict(http, "painting", content=png(grey[0]))
    assert one.headers["content-type"] == "image/png" and one.headers["halfeven-version"] == "3"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(one.content))), wanted[0])
    both = predict(http, "painting", files=[("f", png(pixels)) for pixels in grey]).json()["predictions"]
    for picture, pixels in zip(both, wanted, strict=True):
        image = Image.open(io.BytesIO(base64.b64decode(picture["b64"])))
        np.testing.assert_array_equal(np.asarray(image), pixels)
    reply = predict(http, "painting", "application/json", content=png(grey[0])).json()["predictions"]
    assert reply == both[:1]


def test_numpy_files_go_in_and_come_out(http: httpx.Client) -> None:
    array = np.random.default_rng().standard_normal((3, 4)).astype(np.float32)
    answer = predict(http, "double", "application/x-npz", content=npz(x=array))
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.content))["y"], array * 2)
    answer = predict(http, "double", "application/x-npy", content=npy(array))
    assert answer.headers["content-type"] == "application/x-npy"
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), array * 2)


def test_a_bad_body_is_a_problem_of_its_sender_alone(http: httpx.Client, grey: np.ndarray) -> None:
    sizes = b"IHDR" + struct.pack(">IIBBBBB", 65_535, 65_535, 8, 0, 0, 0, 0)
    bomb = png(grey[0])[:12] + sizes + struct.pack(">I", zlib.crc32(sizes)) + png(grey[0])[33:]
    for content, status, fault in (
        (b"\x89PNG\r\n\x1a\n", 400, "header cannot be read"),
        (bomb, 413, "65535 × 65535 pixels"),
        (b"PK\x03\x04", 400, "not an npz file: it breaks off"),
        (b"\x93NUMPY", 400, "not an npy file"),
        (
            bytes(2**20 + 1),
            413,
            "1048576 bytes; send fewer rows in one request, or start the server with a larger HALFEVEN_MAX_BODY_MIB",
        ),
    ):
        answer = predict(http, "seeing", content=content)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert fault in answer.json()["detail"]
    assert predict(http, "seeing", content=png(grey[0])).status_code == 200


def large_json() -> bytes:
    return json.dumps({"instances": [[0.5] * 40_000]}).encode()


def test_nobody_waits_while_a_large_body_is_read(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, grey: np.ndarray
) -> None:
    begun, go_on, where = threading.Event(), threading.Event(), []
    read = predict_routes.read_body_of

    def slow(spec: ModelSpec, *more: Any) -> Any:
        where.append(threading.current_thread().name)
        if spec.name == "wide":
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return read(spec, *more)

    monkeypatch.setattr(predict_routes, "read_body_of", slow)
    with ThreadPoolExecutor(1) as other:
        large = other.submit(
            lambda: httpx.post(f"{http.base_url}/v1/models/wide:predict", content=large_json())
        )
        assert begun.wait(PATIENCE_S)
        small = predict(http, "double", json={"instances": [[1, 2, 3, 4]]})
        assert small.json() == {"predictions": [[2, 4, 6, 8]]} and not large.done()
        assert predict(http, "seeing", content=png(grey[0])).status_code == 200
        go_on.set()
        assert large.result(PATIENCE_S).json() == {"predictions": [20_000.0]}
    pooled = [name.startswith("halfeven-predict") for name in where]
    assert pooled == [True, False, True], "large and small JSON, a picture"


def test_the_document_names_every_kind_of_body(http: httpx.Client) -> None:
    route = http.get("/openapi.json").json()["paths"]["/v1/models/{m}:predict"]["post"]
    assert set(route["requestBody"]["content"]) == {
        "application/json", "multipart/form-data", "image/png", "image/jpeg", "application/x-npy", "application/x-npz",
    }  # fmt: skip


def test_too_much_work_is_refused_and_what_a_vanished_caller_left_is_counted_till_it_ends() -> None:
    asyncio.run(crowded(WorkerThreads(threads=1, most_waiting=1)))


async def crowded(worker_threads: WorkerThreads) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return 7

    first, second = (
        asyncio.create_task(worker_threads.run(work)),
        asyncio.create_task(worker_threads.run(lambda: 8)),
    )
    await asyncio.to_thread(begun.wait, 20)
    with pytest.raises(Overloaded, match="2 requests with pictures"):
        await worker_threads.run(work)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(Overloaded):
        await worker_threads.run(work)
    go_on.set()
    assert await second == 8
    assert await worker_threads.run(lambda: 9) == 9
