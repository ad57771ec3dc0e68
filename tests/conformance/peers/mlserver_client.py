# pyright: reportMissingImports=false
"""MLServer's types and codecs over HTTP, and the client of its `mlserver infer`, against ``http://HOST:PORT`` (the
argument): what they read, as one JSON line."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import httpx
import numpy as np
from bare import bare

bare("mlserver")
from mlserver.batch_processing import process_batch  # noqa: E402
from mlserver.codecs import NumpyCodec, NumpyRequestCodec  # noqa: E402
from mlserver.types import (  # noqa: E402
    InferenceErrorResponse,
    InferenceRequest,
    InferenceResponse,
    MetadataModelResponse,
    MetadataServerResponse,
)

FIRST = np.arange(16, dtype=np.int32)[None]


def request(id: str = "7", more: int = 0) -> InferenceRequest:
    inputs = [NumpyCodec.encode_input(f"INPUT{i}", FIRST + more) for i in range(2)]
    return InferenceRequest(id=id, inputs=inputs)


def infer(http: httpx.Client, body: str, status: int = 200) -> bytes:
    answer = http.post("/v2/models/simple/infer", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.content


async def offline(url: str) -> list[int]:
    """`mlserver infer`: a file of requests in, a file of answers out; the first number of each, rising."""
    with tempfile.TemporaryDirectory() as name:
        asked, came = Path(name) / "asked.jsonl", Path(name) / "came.jsonl"
        asked.write_text("".join(request(str(i), i).model_dump_json() + "\n" for i in range(5)))
        await process_batch(
            model_name="simple", url=url.removeprefix("http://"), workers=2, retries=1, input_data_path=str(asked),
            output_data_path=str(came), binary_data=False, batch_size=2, batch_interval=0.0, batch_jitter=0.0,
            timeout=60, transport="rest", request_headers=(), insecure=False, verbose=False, extra_verbose=False,
            use_ssl=False,
        )  # fmt: skip
        answers = [InferenceResponse.model_validate_json(line) for line in came.read_text().splitlines()]
        return sorted(int(NumpyCodec.decode_output(one.outputs[0]).ravel()[0]) for one in answers)


def main(url: str) -> dict[str, object]:
    with httpx.Client(base_url=url, timeout=60) as http:
        server = MetadataServerResponse.model_validate_json(http.get("/v2").content)
        model = MetadataModelResponse.model_validate_json(http.get("/v2/models/simple").content)
        answer = InferenceResponse.model_validate_json(infer(http, request().model_dump_json()))
        ranked = NumpyRequestCodec.encode_request(np.ones((2, 6), np.float32))
        fault = InferenceErrorResponse.model_validate_json(infer(http, ranked.model_dump_json(), 400))
    return {
        "server": [server.name, bool(server.extensions)],
        "model": [model.name, model.versions, [(t.name, t.datatype, t.shape) for t in model.inputs or []]],
        "id": answer.id,
        "outputs": {one.name: NumpyCodec.decode_output(one).ravel().tolist() for one in answer.outputs},
        "error": fault.error,
        "offline": asyncio.run(offline(url)),
    }


print(json.dumps(main(sys.argv[1])))
