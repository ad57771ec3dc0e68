"""Loading and unloading over HTTP, as `simple_http_model_control.py` does it, on a server with seven models."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as triton
from halfeven.models.store.store import Store
from tritonclient.utils import InferenceServerException

from tests.conformance.conftest import Serving, answers_right, served
from tests.conformance.hosted import MODELS, SIMPLE_OF_16, host
from tests.conformance.triton_examples import FOLDER, run_example
from tests.patience import until

SEVEN = ["simple", *sorted(set(MODELS) - {"simple"})[:6]]  # the script wants exactly so many


@pytest.fixture(scope="module")
def serving(hosted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of this file alone: its models come and go."""
    folder = tmp_path_factory.mktemp("seven")
    store = folder / "store"
    host(Store(store), folder / "models", {"simple": SIMPLE_OF_16})
    for name in SEVEN[1:]:
        shutil.copytree(hosted / "models" / name, store / "models" / name)
    with served(store, SEVEN) as server:
        yield server


@pytest.fixture
def client(serving: Serving) -> Iterator[Any]:
    with triton.InferenceServerClient(serving.address) as client:
        yield client
        client.load_model("simple")  # the others stay as they are


def gone(client: Any, name: str) -> None:
    """Unloading is asynchronous by the protocol: clients ask until the model is not ready."""
    client.unload_model(name)
    until(lambda: not client.is_model_ready(name))


@pytest.mark.skipif(not FOLDER, reason="HALFEVEN_TRITON_EXAMPLES names no folder of examples")
def test_the_example_passes(serving: Serving, client: Any) -> None:
    client.load_model("simple", config='{"max_batch_size":"8"}')  # the script sets it from 8 to 16
    done = run_example("simple_http_model_control.py", serving.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: model control" in done.stdout


@pytest.mark.slow(seconds=5)
def test_the_index_has_one_ready_line_per_model(client: Any) -> None:
    index = client.get_model_repository_index()
    assert {entry["name"]: entry["state"] for entry in index} == dict.fromkeys(SEVEN, "READY")


@pytest.mark.slow
def test_an_unloaded_model_is_not_ready_and_comes_back(client: Any, serving: Serving) -> None:
    gone(client, "simple")
    assert client.is_server_live()
    (entry,) = (entry for entry in client.get_model_repository_index() if entry["name"] == "simple")
    assert entry.get("state") != "READY"
    client.load_model("simple")
    assert client.is_model_ready("simple")
    with serving.client() as caller:
        answers_right(caller)


@pytest.mark.slow(seconds=7)
def test_a_load_may_override_the_largest_batch_and_the_next_load_takes_it_back(client: Any) -> None:
    for rows in ("8", "16", "3"):
        client.load_model("simple", config=f'{{"max_batch_size":"{rows}"}}')
        assert client.get_model_config("simple")["max_batch_size"] == int(rows)
    gone(client, "simple")
    client.load_model("simple")
    assert client.get_model_config("simple")["max_batch_size"] == 16


def test_a_load_cannot_ask_for_larger_batches_than_were_proven(client: Any) -> None:
    with pytest.raises(
        InferenceServerException, match=r"failed to load 'simple'.* proven from 1 to 16, got 17"
    ):
        client.load_model("simple", config='{"max_batch_size":17}')
    assert client.get_model_config("simple")["max_batch_size"] == 16


def test_a_wrong_override_fails_to_load_and_leaves_the_model_as_it_was(client: Any, serving: Serving) -> None:
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("simple", config='{"max_batch_size":"many"}')
    assert client.get_model_config("simple")["max_batch_size"] == 16
    with serving.client() as caller:
        answers_right(caller)
