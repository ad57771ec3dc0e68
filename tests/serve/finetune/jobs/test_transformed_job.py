"""A transform through the API, in two processes: rows that are learnt from have it, held-out rows do not."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.kept import kept_store
from tests.serve.finetune.jobs.hard_job import publish, rows, store_of
from tests.serve.finetune.jobs.job_server import create, ended, served_to_client

AUGMENT = """
import torch

def noisy_and_all_of_class_0(inputs, targets):
    return {"x": inputs["x"] + 0.1 * torch.randn(4)}, {"y": torch.zeros_like(targets["y"])}
"""
NET = "from torch import nn\n\ndef build():\n    return nn.Linear(4, 3)\n"


def _convert(root: Path) -> None:
    training = {"transform": "augment.py:noisy_and_all_of_class_0"}
    publish(root, "net", NET, files={"augment.py": AUGMENT}, training=training)


@pytest.mark.slow(seconds=15)
def test_rows_of_a_table_are_transformed_in_two_processes_and_held_out_rows_are_as_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFEVEN_TRAINER_PROCESSES", "2")
    table = pyarrow.table({name: array.tolist() for name, array in rows(120).items()})
    parquet.write_table(table, tmp_path / "rows.parquet")
    values = {"n_epochs": 12, "batch_size": 16, "learning_rate": 0.05, "precision": "fp32"}
    store = store_of(kept_store(__file__, _convert), tmp_path)
    with served_to_client(store, "net") as (_, _, client):
        job = ended(client, create(client, "net", tmp_path / "rows.parquet", values).id)
        (last, *_) = client.fine_tuning.jobs.checkpoints.list(job.id).data
    made = job.to_dict()["halfeven"]
    lineage = store.version("net", made["version"]).manifest["lineage"]
    assert lineage["trained_with"]["processes"] == 2
    # Learnt: class 0. Held out: three classes, which are answered the worse, the more is learnt.
    learnt, held_out = made["summary"]["last_loss"], last.metrics.full_valid_loss
    assert held_out is not None and learnt < 0.3 and held_out > 3 * learnt
