"""The example scripts of tritonclient, unmodified, against our server.

They lie in `src/python/examples` of the public repository triton-inference-server/client (BSD-3) and not in
ours: `HALFEVEN_TRITON_EXAMPLES` names a folder that has them (docs/conformance.md). Without it these tests
are skipped by name; what the scripts check, `test_clients.py` checks in our own words everywhere.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance.conftest import Serving
from tests.conformance.triton_examples import FOLDER, run_example

pytestmark = pytest.mark.skipif(not FOLDER, reason="HALFEVEN_TRITON_EXAMPLES names no folder of examples")

# script: its last words where it has some
PASSING = {
    "simple_http_infer_client.py": "Request for unknown model",
    "simple_http_async_infer_client.py": "",
    "simple_http_aio_infer_client.py": "PASS: infer",
    "simple_http_health_metadata.py": "simple",
}
# `simple_http_model_control.py` has a server of its own, in test_model_control.py.

BYTES, MEMORY, STATE = "BYTES tensors", "shared memory", "sequences"
CANNOT = {
    "simple_http_string_infer_client.py": BYTES,
    "simple_http_shm_string_client.py": BYTES,
    "simple_http_shm_client.py": MEMORY,
    "simple_http_cudashm_client.py": MEMORY,
    "reuse_infer_objects_client.py": MEMORY,  # its first half passes; test_clients.py has that half
    "simple_http_sequence_sync_infer_client.py": STATE,
}
ELSEWHERE = {  # not refused by us; the script wants something of its surroundings
    "memory_growth_test.py": "has localhost:8000 written into it; test_clients.py has it in our words",
    "image_client.py": "wants densenet and a photograph of a vulture",
    "ensemble_image_client.py": "ensembles, and the photograph",
    "simple_http_model_control.py": "a server of its own, in test_model_control.py",
}
CODINGS = ("deflate", "gzip", "")


@pytest.mark.parametrize("script", PASSING)
def test_an_example_passes(script: str, serving: Serving) -> None:
    done = run_example(script, serving.address, "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert PASSING[script] in done.stdout


@pytest.mark.parametrize("script", ["simple_http_infer_client.py", "simple_http_aio_infer_client.py"])
@pytest.mark.parametrize("response", CODINGS)
@pytest.mark.parametrize("request_", CODINGS)
def test_an_example_passes_compressed(script: str, request_: str, response: str, serving: Serving) -> None:
    options: Sequence[str] = []
    for side, coding in (("request", request_), ("response", response)):
        options = [*options, f"--{side}-compression-algorithm", coding] if coding else options
    done = run_example(script, serving.address, *options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", CANNOT)
def test_an_example_that_cannot_pass_is_told_what_is_missing(script: str, serving: Serving) -> None:
    done = run_example(script, serving.address)
    said = (done.stdout + done.stderr).lower()
    assert done.returncode != 0
    words = {
        BYTES: ("unknown model", "shared memory"),
        MEMORY: ("shared memory", "cudart"),
        STATE: ("unknown model",),
    }
    assert any(word in said for word in words[CANNOT[script]]), said


def test_every_example_over_http_is_accounted_for() -> None:
    http = {path.name for path in Path(FOLDER or "").glob("*.py") if "tritonclient.http" in path.read_text()}
    assert http - set(PASSING) - set(CANNOT) - set(ELSEWHERE) == set()
