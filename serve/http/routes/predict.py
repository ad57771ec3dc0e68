"""``POST /v1/models/{m}:predict``: read a body of any kind, submit, write what the caller accepts. ``:endpoint``: the
same with the operator's own code before and behind the model (`serve/endpoint/`).

Bodies that take long to read (pictures, large JSON, npz) are read in a few threads, so that the event loop and other
requests go on.
"""

from collections.abc import Mapping

from fastapi import FastAPI, HTTPException, Request, Response

from ....models.errors import UnknownName
from ....models.spec.spec import ModelSpec
from ...endpoint.endpoint_process import EndpointProcess
from ..caller import answer_or_leave, done_or_leave, is_json, lease_of, read_body
from ..codecs.infer import InferCodec, InferRequest
from ..codecs.numpy_files import NPY_TYPE, NPZ_TYPE
from ..codecs.predict import (
    JSON_TYPE,
    PNG_TYPE,
    PredictRequest,
    answer_type,
    is_quick,
    is_quick_to_write,
    read_body_of,
    write_answer,
)
from ..content_coding import decoded
from ..inference import Inference, parameters_of
from ..limits.memory_budget import json_bytes
from ..route_scopes import permit_of
from .infer import SMALL_JSON, answer_headers

POST_ONLY = "POST only"  # the name of routes that refuse GET
_TYPES = (JSON_TYPE, "multipart/form-data", PNG_TYPE, "image/jpeg", NPY_TYPE, NPZ_TYPE)
_INSTANCES = {"type": "array", "minItems": 1, "description": "a nested list each, or an object by input name"}
_JSON = {"type": "object", "required": ["instances"], "properties": {"instances": _INSTANCES}}
_BODY = {
    "content": {kind: {"schema": _JSON if kind == JSON_TYPE else {}} for kind in _TYPES},
    "required": True,
}


def add_predict(app: FastAPI, inference: Inference, max_body_bytes: int, body_timeout_s: float) -> None:
    @app.post("/v1/models/{m}/versions/{v}:predict", tags=["predict"], openapi_extra={"requestBody": _BODY})
    @app.post("/v1/models/{m}:predict", tags=["predict"], openapi_extra={"requestBody": _BODY})
    async def predict(m: str, request: Request, v: str | None = None) -> Response:
        """`{"instances": [...]}` → `{"predictions": [...]}`; also PNG and JPEG files, npy and npz."""
        inference.find((m, v))  # refuse an unknown model before its body is read
        body = await _read(request, inference, max_body_bytes, body_timeout_s)
        content_type, lease = request.headers.get("content-type", ""), lease_of(request.scope)

        def read(codec: InferCodec) -> PredictRequest:
            asked = read_body_of(codec.spec, content_type, body, max_body_bytes, lease)
            kind = answer_type(codec.spec, asked.rows, request.headers.get("accept", ""))
            return asked._replace(kind=kind)

        begun = await inference.ask((m, v), read, aside=not is_quick(content_type, body))
        answer = await answer_or_leave(begun.future, request.receive)
        spec, kind = begun.codec.spec, begun.request.kind
        if is_quick_to_write(spec, answer.outputs):
            written = write_answer(spec, answer.outputs, kind)
        else:
            written = await inference.worker_threads.run(write_answer, spec, answer.outputs, kind)
        response = Response(written, media_type=kind)
        response.raw_headers.extend(answer_headers(answer))
        return response

    # The routes of models would else take what is behind the colon for a part of the name.
    @app.get("/v1/models/{m}/versions/{v}:predict", include_in_schema=False, name=POST_ONLY)
    @app.get("/v1/models/{m}:predict", include_in_schema=False, name=POST_ONLY)
    @app.get("/v1/models/{m}:endpoint", include_in_schema=False, name=POST_ONLY)
    async def not_to_get(m: str, v: str | None = None) -> Response:
        raise HTTPException(405)


async def _read(request: Request, inference: Inference, most: int, timeout_s: float) -> bytes:
    """The body as it was before its Content-Encoding. Raises what `read_body` and `decoded` raise."""
    body = await read_body(request.scope, request.receive, most, timeout_s)
    coding = ", ".join(request.headers.getlist("content-encoding"))
    return await decoded(body, coding, most, lease_of(request.scope), inference.worker_threads.run)


def add_endpoints(
    app: FastAPI,
    inference: Inference,
    endpoints: Mapping[str, EndpointProcess],
    max_body_bytes: int,
    body_timeout_s: float,
) -> None:
    app.state.endpoints = endpoints.values()  # to be closed with the server

    @app.post("/v1/models/{m}:endpoint", tags=["predict"])
    async def endpoint(m: str, request: Request) -> Response:
        """Send any body through the operator's `halfeven.Endpoint` and the model; its answer comes back."""
        served = inference.find((m, None))
        if (process := endpoints.get(m)) is None:
            raise UnknownName(
                f"model '{m}' has no endpoint: `halfeven serve --endpoint FILE.py:CLASS` gives it one"
            )
        body = await _read(request, inference, max_body_bytes, body_timeout_s)
        as_json = is_json(request.headers.get("content-type", ""))
        if as_json:
            large, threads = len(body) > SMALL_JSON, inference.worker_threads
            lease_of(request.scope).add(await threads.run(json_bytes, body) if large else json_bytes(body))
        with process.places.take(permit_of(request.scope).owner):
            return await _through(process, served.spec, body, as_json, request)

    async def _through(
        process: EndpointProcess, spec: ModelSpec, body: bytes, as_json: bool, request: Request
    ) -> Response:
        datatypes = {one.name: one.datatype for one in spec.inputs}
        id, tensors, length = await done_or_leave(
            process.preprocess(body, as_json, datatypes), request.receive
        )

        def read(codec: InferCodec) -> InferRequest:
            return codec.read(tensors, length)

        try:
            lease_of(request.scope).add(len(tensors))
            begun = await inference.ask((process.model, None), read, aside=len(tensors) > SMALL_JSON)
            answer = await answer_or_leave(begun.future, request.receive)
            said = begun.codec.write(
                begun.request, answer.outputs, answer.prepared.version, parameters_of(answer)
            )
            head = None if said.header_length is None else str(said.header_length)
            kind, written = await done_or_leave(process.postprocess(id, said.body, head), request.receive)
        except BaseException:
            process.forget(id)
            raise
        response = Response(written, media_type=kind)
        response.raw_headers.extend(answer_headers(answer))
        return response
