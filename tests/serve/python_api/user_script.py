# pyright: strict
"""A user's program, which pyright checks as strictly as it can: the Python API is typed. Nothing runs it."""

import asyncio

import halfeven as he
import numpy as np


def convert_and_look(folder: str) -> tuple[he.Half, float]:
    x = np.zeros((32, 4), np.float32)
    half = he.convert("mymodel.onnx", samples={"x": x}, keep=["op:softmax"], level="O1", kind="logits")
    names: list[str] = [f"{kept.node}: {kept.reason}" for kept in half.kept]
    print(half.verdict.upper(), names)
    half.save(folder).export("out", target="tensorrt")
    proof = he.prove(half, against="http://127.0.0.1:8000").raise_if_unequal()
    return he.load(folder, "mymodel"), proof.max_error_u or half.max_error_u or 0.0


class Detector(he.Endpoint):
    model = "detector"

    def preprocess(self, request: dict[str, list[float]]) -> np.ndarray:
        return np.array(request["values"], np.float32).reshape(-1, 4)

    def postprocess(self, outputs: np.ndarray) -> dict[str, object]:
        return {"best": outputs.argmax(-1)}


def serve_and_ask(half: he.Half) -> str:
    with he.serve(half, port=0) as server:
        client = he.Client(server.url, key="", retries=3)
        answers = client.infer("mymodel", {"x": np.zeros((1, 4), np.float32)})
        shapes: list[tuple[int, ...]] = [array.shape for array in answers.values()]
        job = client.finetune("mymodel", data="rows.safetensors", epochs=2)
        facts: dict[str, object] = job.wait(timeout_s=60)
        return f"{shapes} {facts['status']} {job.status}"


async def ask_many(url: str) -> int:
    async with he.AsyncClient(url, concurrency=8) as client:
        infer = (client.infer("mymodel", {"x": np.zeros((1, 4), np.float32)}) for _ in range(8))
        found: list[dict[str, np.ndarray]] = await asyncio.gather(*infer)
        return len(found)
