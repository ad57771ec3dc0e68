# pyright: reportMissingImports=false
"""KServe's REST client against ``http://HOST:PORT`` (the argument): what it read, as one JSON line."""

import asyncio
import json
import sys

import httpx
import numpy as np
from bare import bare

bare("kserve")
from kserve.inference_client import InferenceRESTClient, RESTConfig  # noqa: E402
from kserve.protocol.infer_type import InferInput, InferOutput, InferRequest, RequestedOutput  # noqa: E402

FIRST = np.arange(16, dtype=np.int32)[None]


async def main(url: str) -> dict[str, object]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    found: dict[str, object] = {
        "live": await client.is_server_live(url),
        "ready": await client.is_server_ready(url),
        "model": await client.is_model_ready(url, "simple"),
        "unknown": await client.is_model_ready(url, "nobody"),
    }
    for kind in ("json", "binary"):
        inputs = [InferInput(f"INPUT{i}", [1, 16], "INT32") for i in range(2)]
        for tensor in inputs:
            tensor.set_data_from_numpy(FIRST, binary_data=kind == "binary")
        asked = [RequestedOutput(f"OUTPUT{i}", {"binary_data": kind == "binary"}) for i in range(2)]
        request = InferRequest("simple", inputs, request_id="7", request_outputs=asked)
        answer = await client.infer(url, request, model_name="simple")
        outputs: list[InferOutput] = answer.outputs
        found[kind] = {
            "id": answer.id,
            "model": answer.model_name,
            "outputs": {one.name: one.as_numpy().ravel().tolist() for one in outputs},
        }
    try:
        await client.infer(url, {"inputs": []}, model_name="simple")
    except httpx.HTTPStatusError as error:
        found["error"] = [error.response.status_code, str(error)]
    await client.close()
    return found


print(json.dumps(asyncio.run(main(sys.argv[1]))))
