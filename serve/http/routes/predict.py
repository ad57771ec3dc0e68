"""``POST /v1/models/{m}:predict``: read a body of any kind, submit, write what the caller accepts.

Bodies that take long to read (pictures, large JSON, npz) are read in a few threads, so that the event loop and other
requests go on.
"""

from collections.abc import Callable

from fastapi import FastAPI, HTTPException, Request, Response

from ....models.errors import NotReady
from ...batching.interface import Answer, Roster, Served
from ..caller import answer_or_leave, lease_of, read_body
from ..codecs.numpy_files import NPY_TYPE, NPZ_TYPE
from ..codecs.predict import PredictRequest
from ..codecs.predict_answers import JSON_TYPE, PNG_TYPE, answer_type, is_quick_to_write, write_answer
from ..codecs.predict_bodies import is_quick, read_body_of
from ..limits.memory_budget import Lease
from ..limits.worker_threads import WorkerThreads
from .infer import answer_headers

_TYPES = (JSON_TYPE, "multipart/form-data", PNG_TYPE, "image/jpeg", NPY_TYPE, NPZ_TYPE)
_INSTANCES = {"type": "array", "minItems": 1, "description": "a nested list each, or an object by input name"}
_JSON = {"type": "object", "required": ["instances"], "properties": {"instances": _INSTANCES}}
_BODY = {
    "content": {kind: {"schema": _JSON if kind == JSON_TYPE else {}} for kind in _TYPES},
    "required": True,
}


def add_predict(app: FastAPI, roster: Roster, max_body_bytes: int, body_timeout_s: float) -> None:
    worker_threads = WorkerThreads()

    @app.post("/v1/models/{m}/versions/{v}:predict", tags=["predict"], openapi_extra={"requestBody": _BODY})
    @app.post("/v1/models/{m}:predict", tags=["predict"], openapi_extra={"requestBody": _BODY})
    async def predict(m: str, request: Request, v: str | None = None) -> Response:
        """`{"instances": [...]}` → `{"predictions": [...]}`; also PNG and JPEG files, npy and npz."""
        roster.find(m, v)  # refuse an unknown model before its body is read
        headers = request.headers
        body = await read_body(request.scope, request.receive, max_body_bytes, body_timeout_s)
        kinds, lease = (headers.get("content-type", ""), headers.get("accept", "")), lease_of(request.scope)
        served, asked, kind = await _read(
            worker_threads, lambda: roster.find(m, v), *kinds, body, max_body_bytes, lease
        )
        answer = await answer_or_leave(served.submit(asked.arrays, asked.rows), request.receive)
        response = Response(await _written(worker_threads, served, answer, kind), media_type=kind)
        response.raw_headers.extend(answer_headers(answer))
        return response

    # Else the routes of models would take ":predict" for a part of the name.
    @app.get("/v1/models/{m}/versions/{v}:predict", include_in_schema=False)
    @app.get("/v1/models/{m}:predict", include_in_schema=False)
    async def not_to_get(m: str, v: str | None = None) -> Response:
        raise HTTPException(405, "Method Not Allowed", {"allow": "POST"})


async def _read(
    worker_threads: WorkerThreads,
    find: Callable[[], Served],
    content_type: str,
    accept: str,
    body: bytes,
    max_bytes: int,
    lease: Lease,
) -> tuple[Served, PredictRequest, str]:
    """The model that is to answer (``find`` again: another version may be active by now), the request that was read,
    and the type of its answer."""
    served = find()
    spec = served.spec
    if is_quick(content_type, body):
        asked = read_body_of(spec, content_type, body, max_bytes, lease)
    else:
        asked = await worker_threads.run(read_body_of, spec, content_type, body, max_bytes, lease)
        served = find()
        if served.spec is not spec and served.spec.signature() != spec.signature():
            raise NotReady(
                f"model '{served.name}' has changed its inputs while the request was read; send it again"
            )
    return served, asked, answer_type(spec, asked.rows, accept)


async def _written(worker_threads: WorkerThreads, served: Served, answer: Answer, kind: str) -> bytes:
    spec = served.spec
    if is_quick_to_write(spec, answer.outputs):
        return write_answer(spec, answer.outputs, kind)
    return await worker_threads.run(write_answer, spec, answer.outputs, kind)
