"""A transform through the API, in two processes: rows that are learnt from have it, held-out rows do not."""

from pathlib import Path

import httpx
import pyarrow
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from pyarrow import parquet
from safetensors.numpy import save_file

from tests.model_folders import tensor, write_folder
from tests.patience import PATIENCE_S
from tests.serve.finetune.jobs.hard_job import rows
from tests.serve.finetune.jobs.job_server import ended, served_to_client

AUGMENT = """
import torch

def noisy_and_all_of_class_0(inputs, targets):
    return {"x": inputs["x"] + 0.1 * torch.randn(4)}, {"y": torch.zeros_like(targets["y"])}

def fails(inputs, targets):
    raise ValueError("no such picture")
"""
NET = "from torch import nn\n\ndef build():\n    return nn.Linear(4, 3)\n"


def store_of(folder: Path) -> Store:
    """``net`` and ``failing`` are active."""
    store, outputs = Store(folder / "store"), [tensor("y", "FP32", [-1, 3], kind="logits")]
    for name, function in (("net", "noisy_and_all_of_class_0"), ("failing", "fails")):
        made = write_folder(
            folder / name, NET, outputs=outputs, max_batch_size=8, samples=rows(64),
            files={"augment.py": AUGMENT}, training={"transform": f"augment.py:{function}"},
        )  # fmt: skip
        assert convert(made, store, Options(forms=("torch",))).any_passed
    return store


@pytest.mark.slow(seconds=30)
def test_the_same_rows_give_the_same_weights_in_every_format_and_held_out_rows_are_as_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFEVEN_TRAINER_PROCESSES", "2")
    store, data = store_of(tmp_path), rows(120)
    save_file(data, tmp_path / "rows.safetensors")
    table = pyarrow.table({name: array.tolist() for name, array in data.items()})
    parquet.write_table(table, tmp_path / "rows.parquet")
    values = {"n_epochs": 12, "batch_size": 16, "learning_rate": 0.05, "precision": "fp32"}
    with served_to_client(store, "net") as (_, port, client):
        files = {
            kind: client.files.create(file=tmp_path / f"rows.{kind}", purpose="fine-tune").id
            for kind in ("safetensors", "parquet")
        }
        jobs = [
            client.fine_tuning.jobs.create(
                model="net@1", training_file=file, seed=7, extra_body={"hyperparameters": values}
            )
            for file in files.values()
        ]
        made = [ended(client, job.id).to_dict()["halfeven"] for job in jobs]
        (last, *_) = client.fine_tuning.jobs.checkpoints.list(jobs[0].id).data
        asked = {"model": "failing", "training_file": files["parquet"], "hyperparameters": values}
        url = f"http://127.0.0.1:{port}/v1/fine_tuning/jobs/validate"
        failing = httpx.post(url, json=asked, timeout=PATIENCE_S).json()
    lineages = [store.version("net", one["version"]).manifest["lineage"] for one in made]
    assert len({lineage["weights"] for lineage in lineages}) == 1
    assert [lineage["trained_with"]["processes"] for lineage in lineages] == [2, 2]
    # Learnt: class 0. Held out: three classes, which are answered the worse, the more is learnt.
    learnt, held_out = made[0]["summary"]["last_loss"], last.metrics.full_valid_loss
    assert held_out is not None and learnt < 0.3 and held_out > 3 * learnt
    assert (failing["valid"], failing["error"]["code"]) == (False, "USER_CODE")
    assert (
        "ValueError in augment.py, line 8: no such picture. Mend the function" in failing["error"]["message"]
    )
