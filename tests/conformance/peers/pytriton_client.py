# pyright: reportMissingImports=false
"""PyTriton's clients against ``http://HOST:PORT`` (the argument): what they read, as one JSON line."""

import asyncio
import json
import sys

import numpy as np
from bare import bare

bare("pytriton")
from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient  # noqa: E402
from pytriton.client.exceptions import PyTritonClientInferenceServerError  # noqa: E402

ROW = np.arange(16, dtype=np.int32)
BATCH = np.stack([ROW, ROW + 1])


def described(outputs: dict[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: array.ravel().tolist() for name, array in outputs.items()}


async def asynchronous(url: str) -> dict[str, object]:
    async with AsyncioModelClient(url, "simple", init_timeout_s=60, inference_timeout_s=60) as client:
        await client.wait_for_model(60)
        sample = await client.infer_sample(INPUT0=ROW, INPUT1=ROW)
        return {"sample": described(sample), "batch": described(await client.infer_batch(BATCH, BATCH))}


def main(url: str) -> dict[str, object]:
    found: dict[str, object] = {"asyncio": asyncio.run(asynchronous(url))}
    with ModelClient(url, "simple", init_timeout_s=60, inference_timeout_s=60) as client:
        client.wait_for_model(60)
        config = client.model_config
        found["config"] = [config.model_name, config.max_batch_size, [spec.name for spec in config.inputs]]
        found["sync"] = {
            "sample": described(client.infer_sample(ROW, ROW)),
            "batch": described(client.infer_batch(INPUT0=BATCH, INPUT1=BATCH)),
        }
        try:
            client.infer_batch(BATCH[:, :3], BATCH)
        except PyTritonClientInferenceServerError as error:
            found["error"] = str(error)
    with FuturesModelClient(url, "simple", max_workers=2) as client:
        waiting = [client.infer_batch(BATCH + i, BATCH) for i in range(8)]
        found["futures"] = [described(one.result(60))["OUTPUT0"][0] for one in waiting]
    return found


print(json.dumps(main(sys.argv[1])))
