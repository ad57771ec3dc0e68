# pyright: reportMissingImports=false
"""A workload served by PyTriton, in FP32 and without a batching window; run by an interpreter that has it.

    PYTHON pytriton_server.py FOLDER NAME PORT

FOLDER holds the ``model.py`` that `workloads.py` writes. PORT + 1 is used as well.
"""

import importlib
import os
import sys

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

TENSORS = {
    "tiny": (np.float32, (64,), 10),
    "encoder": (np.int64, (32,), 384),
    "image": (np.float32, (3, 64, 64), 100),
}


def main(folder: str, name: str, port: int) -> None:
    sys.path.insert(0, folder)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    net = getattr(importlib.import_module("model"), name)().eval()
    datatype, shape, width = TENSORS[name]

    @batch
    def infer(x: np.ndarray) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            return {"y": net(torch.from_numpy(x)).numpy()}

    addresses = {
        "http_address": "127.0.0.1",
        "http_port": port,
        "grpc_address": "127.0.0.1",
        "grpc_port": port + 1,
    }
    with Triton(config=TritonConfig(**addresses, allow_metrics=False, http_thread_count=8)) as triton:
        triton.bind(
            model_name=name,
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=datatype, shape=shape)],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(width,))],
            config=ModelConfig(max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
        )
        triton.serve()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
