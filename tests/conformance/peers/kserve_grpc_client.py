# pyright: reportMissingImports=false
"""KServe's gRPC client against ``HOST:PORT`` (the argument): what it read, as one JSON line."""

import asyncio
import json
import sys

import grpc
import numpy as np
from bare import bare

bare("kserve")
from kserve.inference_client import InferenceGRPCClient  # noqa: E402
from kserve.protocol.infer_type import InferInput, InferRequest  # noqa: E402

FIRST = np.arange(16, dtype=np.int32)[None]


async def main(address: str) -> dict[str, object]:
    found: dict[str, object] = {}
    async with InferenceGRPCClient(address, timeout=60) as client:
        found["live"] = await client.is_server_live()
        found["ready"] = await client.is_server_ready()
        found["model"] = await client.is_model_ready("simple")
        found["unknown"] = await client.is_model_ready("nobody")
        for kind in ("typed", "raw"):
            inputs = [InferInput(f"INPUT{i}", [1, 16], "INT32") for i in range(2)]
            for tensor in inputs:
                tensor.set_data_from_numpy(FIRST, binary_data=kind == "raw")
            answer = await client.infer(InferRequest("simple", inputs, request_id="7"))
            found[kind] = {
                "id": answer.id,
                "model": answer.model_name,
                "outputs": {one.name: one.as_numpy().ravel().tolist() for one in answer.outputs},
            }
        try:
            await client.infer(
                InferRequest("simple", [InferInput("INPUT0", [1, 16], "INT32", FIRST[0].tolist())])
            )
        except grpc.RpcError as error:
            found["error"] = [error.code().name, error.details()]
    return found


print(json.dumps(asyncio.run(main(sys.argv[1]))))
