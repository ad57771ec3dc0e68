"""The parts of a model that learn, through the API: parameters by pattern, the head, adapters; and the loss."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from halfeven.models.store.store import Store
from halfeven.serve.finetune.jobs.reproducing import reproduce
from safetensors.numpy import load_file

from tests.kept import kept_store
from tests.serve.finetune.jobs import hard_job
from tests.serve.finetune.jobs.hard_job import begin_others, create, store_of
from tests.serve.finetune.jobs.job_server import ended, served_to_client

pytestmark = pytest.mark.slow(seconds=30)  # a server, and a job with its processes for each case
STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
Served = tuple[Store, openai.OpenAI]


@pytest.fixture(scope="module")
def served(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with ``net``, with ``own``, whose folder has a loss, and with ``program``, which has no modules."""
    store = store_of(begun, tmp_path_factory.mktemp("served"))
    others = kept_store(hard_job.__file__, begin_others) / "store" / "models"
    copytree(others, store.root / "models", dirs_exist_ok=True)
    with served_to_client(store, "net") as (_, _, client):
        yield store, client


def trained(served: Served, begun: Path, model: str = "net", **hyperparameters: Any) -> tuple[Any, set[str]]:
    """The job, and the names of the parameters that it changed."""
    store, client = served
    # So few steps on drawn rows may lose accuracy, which the gate would refuse: the claim is what moves.
    short = {"n_epochs": 2, "forgetting_tolerance": 1.0}
    job = ended(client, create(client, begun, model, **{**short, **hyperparameters}).id)
    assert job.status == "succeeded", job.error
    old, new = weights_of(store, job)
    assert old.keys() == new.keys()
    return job, {name for name in old if not np.array_equal(old[name], new[name])} - STATISTICS


def weights_of(store: Store, job: Any) -> list[dict[str, np.ndarray]]:
    """The weights of the version that the job started from, and of the one that it made."""
    ours, model = job.to_dict()["halfeven"], job.model.partition("@")[0]
    numbers = (ours["parent_version"], ours["version"])
    return [load_file(store.version(model, each).file("weights.safetensors")) for each in numbers]


def refused(served: Served, begun: Path, model: str = "net", **hyperparameters: Any) -> str:
    """The message of the refusal, which names the setting."""
    with pytest.raises(openai.BadRequestError) as caught:
        create(served[1], begun, model, **hyperparameters)
    assert caught.value.param in hyperparameters
    return str(caught.value)


def test_only_the_parameters_that_the_job_names_learn(served: Served, begun: Path) -> None:
    assert "'haed.*' fits no weight of the model" in refused(served, begun, trainable=["haed.*"])
    job, moved = trained(served, begun, trainable=["last.*"])
    assert moved == {"last.weight", "last.bias"}
    version = served[0].version("net", job.to_dict()["halfeven"]["version"])
    assert version.manifest["lineage"]["hyperparameters"]["trainable"] == ["last.*"]


def test_adapters_learn_and_are_merged_into_the_weights_that_are_proven(served: Served, begun: Path) -> None:
    job, moved = trained(
        served, begun, trainable="lora", lora_rank=2, lora_targets="first", learning_rate="auto"
    )
    assert moved == {"first.weight"}
    old, new = weights_of(served[0], job)
    singular = np.linalg.svd(new["first.weight"] - old["first.weight"], compute_uv=False)
    assert singular[1] > 1e-5 and np.all(singular[2:] < 1e-5 * singular[0]), "a change of rank 2"
    events = served[1].fine_tuning.jobs.list_events(job.id, limit=100).data
    rate = job.to_dict()["halfeven"]["summary"]["learning_rate"]
    assert any(f"chosen by measurement: learning rate {rate:g} (loss after" in one.message for one in events)
    version = served[0].version("net", job.to_dict()["halfeven"]["version"])
    assert reproduce(served[0], version, None, None, lambda line: None)["equal"]


def test_a_captured_program_has_no_layers_for_adapters_and_says_what_to_do(
    served: Served, begun: Path
) -> None:
    for asked in ({"trainable": "lora"}, {"opt_level": "O2"}):
        said = refused(served, begun, "program", **asked)
        assert "captured program (net.pt2)" in said and "trainable = head" in said


def test_the_loss_of_the_folder_the_schedule_and_the_head_reach_the_trainer(
    served: Served, begun: Path
) -> None:
    assert "is a function of the model folder" in refused(served, begun, "own", loss="losses.py:other")
    settings = {
        "schedule": "linear",
        "warmup_ratio": 0.0,
        "ema_decay": 0.5,
        "precision": "fp32",
        "n_epochs": 1,
        "trainable": "head",
    }
    job, moved = trained(served, begun, "own", **settings)
    assert moved == {"last.weight", "last.bias"}, "the last layer before what is learnt"
    address = str(served[1].base_url).removesuffix("/")
    steps = httpx.get(f"{address}/fine_tuning/jobs/{job.id}/metrics?most=1000").json()["data"]
    rates = [step["learning_rate"] for step in steps]
    assert rates == pytest.approx([0.01 * (1 - at / len(rates)) for at in range(len(rates))])
    assert steps[0]["loss"] > 0.1 * np.log(3), "the part of the loss that smoothing adds"
