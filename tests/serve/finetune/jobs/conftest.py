"""One store and one undisturbed job for every test of this folder that compares with it; a runner without processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from safetensors.numpy import save_file

from tests.model_folders import tensor, write_folder
from tests.serve.finetune.jobs.hard_job import EVERY, NET, STEPS, Outcome, create, outcome, rows, store_of
from tests.serve.finetune.jobs.job_server import ended, served_to_client
from tests.serve.finetune.jobs.runner_stage import Runner


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store in which ``net@1`` is active, and the rows to learn from."""
    root = tmp_path_factory.mktemp("begun")
    outputs = [tensor("y", "FP32", [-1, 3], kind="logits")]
    folder = write_folder(root / "net", NET, outputs=outputs, max_batch_size=8, samples=rows(64))
    assert convert(folder, Store(root / "store"), Options(forms=("torch",))).asked_passed
    save_file(rows(178), root / "train.safetensors")
    return root


@pytest.fixture(scope="session")
def left_alone(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    store = store_of(begun, tmp_path_factory.mktemp("alone"))
    with served_to_client(store, "net") as (_, port, client):
        job = create(client, begun)
        found = outcome(store, client, port, ended(client, job.id))
    skipped = [step for step in found.steps if step["cause"] == "gradient overflow"]
    assert len(skipped) > 5 and len(found.steps) == STEPS
    assert len(found.evaluations) == STEPS // EVERY
    return found


@pytest.fixture(scope="session")
def trained(left_alone: Outcome) -> Store:
    """The store of the undisturbed job: ``net@2`` is what it made, from ``net@1``. Not to be changed."""
    return left_alone.store


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path / "store")
    yield made
    made.job_store.close()
