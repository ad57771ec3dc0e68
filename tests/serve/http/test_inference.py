"""A request is queued only where it fits the version that is active then."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from halfeven.models.errors import NotReady
from halfeven.serve.http.codecs.infer import InferCodec
from halfeven.serve.http.inference import Inference

from tests.serve.conftest import make_roster
from tests.specs import tensor

SIX = {"shape": [1, 6], "data": [1] * 6}
BODY = json.dumps(
    {"inputs": [{"name": "ids", "datatype": "INT64", **SIX}, {"name": "mask", "datatype": "FP32", **SIX}]}
).encode()


def test_a_request_that_narrower_bounds_leave_out_is_not_queued() -> None:
    roster = make_roster()
    served = roster.models["pair"]
    narrow = tuple(tensor(one.name, one.datatype, -1, "length=1..5") for one in served.spec.inputs)

    def read(codec: InferCodec) -> Any:
        request = codec.read(BODY)
        served.spec = replace(served.spec, inputs=narrow)
        return request

    with pytest.raises(NotReady, match="with other inputs or outputs"):
        asyncio.run(Inference(roster).ask(("pair", None), read, aside=False))
    assert not served.rows
