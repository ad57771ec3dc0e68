"""Stores as earlier releases wrote them, by the commands of the tutorial, are served, rolled and trained on.

python -m tests.serve.test_store_of_a_release      keeps a store of this release, when it is made (CONTRIBUTING.md)
"""

import shutil
import sqlite3
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
from halfeven.models.errors import BadInput
from halfeven.models.store.store import Store
from halfeven.models.version import __version__
from halfeven.serve.finetune.jobs.records.database import DATABASE
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings
from safetensors.numpy import load

from tests.command_line import run
from tests.serve.conftest import running
from tests.shell_blocks import ROOT, script, write_commands
from tests.shell_blocks import run as run_shell

STORES = Path(__file__).parent / "stores"
KEPT = ("models", "files", "halfeven.db")
OF_THE_MACHINE = {"tuned", ".promoting"}  # what was measured there, and a lock


def original_answer(version_bytes: bytes, x: np.ndarray) -> np.ndarray:
    weights = load(version_bytes)
    hidden = np.maximum(x @ weights["0.weight"].T + weights["0.bias"], 0)
    return hidden @ weights["2.weight"].T + weights["2.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("archive", sorted(STORES.glob("*.tar.xz")), ids=lambda path: path.name[:-7])
def test_a_store_of_a_release_is_served_with_its_versions_promotions_and_jobs(
    archive: Path, tmp_path: Path, random: np.random.Generator
) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    store = Store(tmp_path / "halfeven-store")
    assert store.numbers("mymodel") == [1, 2] and store.live_number("mymodel") == 1
    jobs = store.root / DATABASE
    with closing(sqlite3.connect(jobs)) as old, old:
        old.execute("INSERT INTO idempotency_keys SELECT '', 'key', id, 'digest' FROM jobs")
    x = random.normal(size=(5, 4)).astype(np.float32)
    with running(build(read_settings(device="cpu"), store)[0]) as address:
        for number in (1, 2):
            ordered = httpx.post(f"http://{address}/v1/models/mymodel/promote", json={"version": number})
            assert ordered.status_code == 200, ordered.text
            done = httpx.post(f"http://{address}/v1/models/mymodel:predict", json={"instances": x.tolist()})
            assert done.headers["halfeven-version"] == str(number)
            expected = original_answer(store.version("mymodel", number).bytes("weights.safetensors"), x)
            np.testing.assert_allclose(
                done.json()["predictions"], expected, atol=4 * 2**-11 * abs(expected).max()
            )
        (job,) = httpx.get(f"http://{address}/v1/fine_tuning/jobs").json()["data"]
        assert (job["status"], job["fine_tuned_model"]) == ("succeeded", "mymodel@2")
        report = httpx.get(f"http://{address}/v1/models/mymodel/versions/2/report")
        assert report.status_code == 200
    for _ in range(2):  # what another release wrote is changed once
        with closing(JobStore(jobs)) as job_store:
            with pytest.raises(BadInput, match=f"was used for job {job['id']}"):
                job_store.replayed("key", {})
            assert job_store.replayed("key", {}, "another owner") is None
    assert run("rollback", "mymodel", "--store", store.root)[0] == 0 and store.live_number("mymodel") == 1
    code, facts, _ = run("parity", "mymodel@2", "--store", store.root)
    assert code == 0, facts


def keep() -> Path:
    """Write the store of this release."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_commands(folder / "bin")
        done = run_shell(script([ROOT / "docs/README.md"], folder / "bin", {}), folder)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        for part in (folder / "halfeven-store").rglob("*"):
            if part.name in OF_THE_MACHINE:
                shutil.rmtree(part) if part.is_dir() else part.unlink()
        target = STORES / f"{__version__}.tar.xz"
        with tarfile.open(target, "w:xz") as packed:
            for part in KEPT:
                packed.add(folder / "halfeven-store" / part, f"halfeven-store/{part}")
        return target


if __name__ == "__main__":
    print(keep())
