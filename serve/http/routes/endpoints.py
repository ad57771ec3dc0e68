"""``POST /v1/models/{m}:endpoint``: the operator's own code before and behind the model (`serve/endpoint/`)."""

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response

from ....models.errors import UnknownName
from ...endpoint.endpoint_process import EndpointProcess
from ..caller import answer_or_leave, lease_of, read_body
from ..codecs.infer import InferCodec, InferRequest
from ..inference import Inference, parameters_of
from ..limits.memory_budget import json_bytes
from .infer import SMALL_JSON, answer_headers


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
        body = await read_body(request.scope, request.receive, max_body_bytes, body_timeout_s)
        is_json = "json" in request.headers.get("content-type", "")
        if is_json:
            lease_of(request.scope).add(json_bytes(body))
        id, tensors, length = await process.preprocess(
            body, is_json, [one.name for one in served.spec.inputs]
        )

        def read(codec: InferCodec) -> InferRequest:
            return codec.read(tensors, length)

        try:
            lease_of(request.scope).add(len(tensors))
            begun = await inference.ask((m, None), read, aside=len(tensors) > SMALL_JSON)
            answer = await answer_or_leave(begun.future, request.receive)
            said = begun.codec.write(
                begun.request, answer.outputs, answer.prepared.version, parameters_of(answer)
            )
            head = None if said.header_length is None else str(said.header_length)
            kind, written = await process.postprocess(id, said.body, head)
        except BaseException:
            process.forget(id)
            raise
        response = Response(written, media_type=kind)
        response.raw_headers.extend(answer_headers(answer))
        return response
