"""A job runner and a supervisor whose processes and roster are stand-ins."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from halfeven.models.store.store import Store, Version
from halfeven.serve.batching.place import Place
from halfeven.serve.finetune.data.files import Files
from halfeven.serve.finetune.data.kept_files import KeptFiles
from halfeven.serve.finetune.jobs.job_folder import JobFolder
from halfeven.serve.finetune.jobs.job_runner import JobRunner
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest, JobRow
from halfeven.serve.finetune.jobs.supervisor import Supervisor
from halfeven.serve.finetune.jobs.training_request import NEEDED, TrainingPlace

nothing: Any = None
nowhere, trainer = Place(torch.device("cpu"), nothing), TrainingPlace("cpu", 1, "low")


class Runner(JobRunner):
    """A runner that trains and converts by what the test says; the rest is the runner's own."""

    def __init__(self, root: Path, roster: Any = nothing, place: Place = nowhere) -> None:
        self.store, self.job_store = Store(root), JobStore(root / "halfeven.db")
        files, stopping = Files(root / "files", 1000), threading.Event()
        super().__init__(self.job_store, files, self.store, roster, place, stopping, trainer)
        self.made: list[str] = []
        self.training: Callable[[JobFolder], None] = lambda folder: None
        self.converting: Callable[[], None] = lambda: None
        self.concluding: Callable[[Version], None] = lambda version: None
        self.conclude = lambda id, version: self.concluding(version)
        publish(self.store)

    def _rows(self, job: JobRow, parent: Version, folder: JobFolder) -> Any:
        return None

    def _warn(self, job: JobRow, parent: Version, rows: Any) -> None: ...

    def _train(self, job: JobRow, parent: Version, rows: Any, folder: JobFolder) -> Any:
        self.made.append("trained")
        self.training(folder)
        weights = folder.of_pass / "weights.safetensors"
        weights.write_bytes(b"new weights")
        return {"weights": str(weights), "digest": "d", "summary": {}}

    def _convert(
        self, job: JobRow, parent: Version, rows: Any, trained: Any, number: int, folder: Path
    ) -> Version:
        self.made.append("converted")
        assert Path(trained["weights"]).read_bytes() == b"new weights"
        self.converting()
        return publish(self.store, job=job.id, **{"pass": number})

    def job(self, model: str = "net", **hyperparameters: Any) -> JobRow:
        if not self.job_store.files():
            self.job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
        return self.job_store.create_job(JobRequest(model, "net", 1, "file-1", hyperparameters, 3))[0]

    def again(self, job: JobRow) -> None:
        """Run the job once more, as the next server does."""
        self.job_store.move(job.id, "queued")
        self.go(job)


def publish(store: Store, **lineage: Any) -> Version:
    with store.draft("net") as draft:
        draft.write_json("nonce.json", len(store.numbers("net")))
        for name in NEEDED:
            draft.write_json(name, {})
        return draft.publish("live", {"lineage": lineage})


def supervisor_of(runner: Runner, roster: Any = None) -> Supervisor:
    kept = KeptFiles(runner.job_store, Files(runner.store.root / "files", 1000))
    supervisor = Supervisor(runner.job_store, kept, runner.store, roster, nowhere, trainer)
    supervisor._runner = runner
    return supervisor


def always(error: Exception) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


class Loading:
    """A roster whose models are not ready before the test lets them be."""

    def __init__(self) -> None:
        self.ready, self.asked = threading.Event(), threading.Event()

    def wait(self, timeout_s: float) -> None:
        self.asked.set()
        if not self.ready.wait(timeout_s):
            raise TimeoutError
