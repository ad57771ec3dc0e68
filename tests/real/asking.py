"""A model of a store asked over HTTP, and how close its answers must be."""

from collections.abc import Mapping

import httpx
import numpy as np
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings

from tests.patience import PATIENCE_S
from tests.serve.conftest import running

# The share of an output's largest value: a half's error is below 4u = 0.002, and a served half may be batched.
CLOSE = 1e-2


def asked_over_http(store: Store, spec: ModelSpec, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    body = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(inputs[tensor.name].shape),
                "data": inputs[tensor.name].reshape(-1).tolist(),
            }
            for tensor in spec.inputs
        ]
    }
    app, roster = build(read_settings(store=store.root, device="cpu"), store)
    with running(app, seconds=60) as address:
        roster.wait(PATIENCE_S)
        answer = httpx.post(f"http://{address}/v2/models/{spec.name}/infer", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return {
        found["name"]: np.array(found["data"]).reshape(found["shape"]) for found in answer.json()["outputs"]
    }
