"""Training a head alone, through the API."""

from pathlib import Path

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file

from tests.serve.finetune.jobs.hard_job import create, store_of
from tests.serve.finetune.jobs.job_server import ended, served_to_client

STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.slow
def test_only_the_parameters_that_the_job_names_learn(begun: Path, tmp_path: Path) -> None:
    store = store_of(begun, tmp_path)
    with served_to_client(store, "net") as (_, _, client):
        with pytest.raises(openai.BadRequestError, match=r"'haed\.\*' fits no weight of the model") as caught:
            create(client, begun, trainable=["haed.*"])
        assert caught.value.param == "trainable"
        job = ended(client, create(client, begun, trainable=["last.*"], n_epochs=4).id)
    number = job.to_dict()["halfeven"]["version"]
    old, new = (load_file(store.version("net", each).file("weights.safetensors")) for each in (1, number))
    moved = {name for name in old if not np.array_equal(old[name], new[name])}
    assert moved - STATISTICS == {"last.weight", "last.bias"}
    assert store.version("net", number).manifest["lineage"]["hyperparameters"]["trainable"] == ["last.*"]
