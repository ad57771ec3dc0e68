"""The routes as the `openai` client, and callers who mean no good, meet them on a real server.

Nothing trains here: the test moves jobs through their states by the job store, as the supervisor does.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import orjson
import pytest
from halfeven.models.errors import BadInput, DiskFull
from halfeven.models.files.opened_file import OpenedFile
from halfeven.models.spec.spec import ModelSpec, TensorSpec
from halfeven.models.store.store import Store, Version
from halfeven.serve.access.keys import Owners
from halfeven.serve.finetune.client.dry_run import dry_run
from halfeven.serve.finetune.data.files import Files
from halfeven.serve.finetune.data.kept_files import KeptFiles
from halfeven.serve.finetune.jobs.job_admission import JobAdmission
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest
from halfeven.serve.finetune.web.api import router
from halfeven.serve.http.limits.request_limits import DEFAULTS
from halfeven.serve.http.routes.app import build_app
from rich.console import Console
from safetensors.numpy import save

from tests.patience import PATIENCE_S, until
from tests.serve.conftest import HISTORY, make_roster, running
from tests.specs import tensor

ROWS, LIMIT = 20, 100_000
MOST = DEFAULTS.orders_being_read


def publish(store: Store, name: str, *outputs: TensorSpec, without: str = "") -> Version:
    spec = ModelSpec(name, (tensor("x", "FP32", -1, 4),), outputs, 8)
    with store.draft(name) as draft:
        draft.write_json("spec.json", spec.to_json())
        for file in ("weights.safetensors", "original.pt2"):
            if file != without:
                (draft.folder / file).write_bytes(b"for the trainer")
        return draft.publish("live", {"model": name})


@dataclass
class Place:
    """One server with its job store, and a client of it."""

    job_store: JobStore
    files: Files
    kept: KeptFiles
    store: Store
    address: str
    client: openai.OpenAI
    woken: list[str] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)

    def upload(self, content: bytes | None = None, name: str = "train.safetensors") -> str:
        return self.client.files.create(file=(name, content or data()), purpose="fine-tune").id

    def create(self, **more: Any) -> Any:
        request = {"model": "net", "training_file": more.pop("training_file", None) or self.upload()}
        return self.client.fine_tuning.jobs.create(**{**request, **more})

    def queued(self, file: str | None = None, **more: Any) -> str:
        """The id of a new job, whose rows nobody has read."""
        terms = JobRequest("net", "net", 2, file or self.upload(), {}, 3, **more)
        return self.job_store.create_job(terms)[0].id

    def left(self) -> list[str]:
        return sorted(path.name for path in self.files.folder.iterdir())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("store")
    store = Store(root)
    logits = tensor("logits", "FP32", -1, 3, kind="logits")
    publish(store, "net", logits)
    store.promote(publish(store, "net", logits))
    store.promote(publish(store, "mute", tensor("best", "INT64", -1, kind="indices")))
    store.promote(publish(store, "bare", logits, without="weights.safetensors"))
    publish(store, "idle", logits)
    job_store, files = JobStore(root / "halfeven.db"), Files(root / "files", LIMIT)
    woken, leaving = list[str](), list[str]()
    app = build_app(make_roster(), lambda: b"", HISTORY)
    wake, leaves = lambda: woken.append("woken"), lambda: bool(leaving)
    tried = lambda request, compare: {"seed": request.seed} | ({"compared": True} if compare else {})  # noqa: E731
    kept = KeptFiles(job_store, files)
    app.include_router(router(job_store, kept, store, wake, leaves, tried))
    with running(app) as address:
        url = f"http://{address}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield Place(job_store, files, kept, store, address, client, woken, leaving)
    job_store.close()


def posted(place: Place, body: bytes, **headers: str) -> httpx.Response:
    kind = {"content-type": "application/json", **headers}
    return httpx.post(f"http://{place.address}/v1/fine_tuning/jobs", content=body, headers=kind)


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng()
    return {
        "x": random.standard_normal((ROWS, 4)).astype(np.float32),
        "target:logits": random.integers(0, 3, ROWS),
    }


def data(**changed: np.ndarray) -> bytes:
    """A training file with fresh rows; ``logits`` stands for ``target:logits``."""
    named = {"target:logits" if name == "logits" else name: array for name, array in changed.items()}
    return save({**arrays(), **named})


@pytest.mark.slow
def test_a_validation_has_the_checks_of_a_job_and_makes_none(place: Place, tmp_path: Path) -> None:
    before, jobs = place.left(), len(place.client.fine_tuning.jobs.list(limit=1000).data)
    rows = tmp_path / "rows.safetensors"
    rows.write_bytes(data())
    address, console, said = f"http://{place.address}", Console(quiet=True), list[str]()
    assert dry_run(address, "net", rows, seed=5, notify=said.append, console=console) == {"seed": 5}
    compared = dry_run(address, "net", rows, seed=5, compare=True, notify=said.append, console=console)
    assert compared == {"seed": 5, "compared": True}
    with pytest.raises(BadInput, match="learning_rate: expected a number from"):
        wrong = {"learning_rate": -1.0}
        dry_run(address, "net", rows, hyperparameters=wrong, notify=said.append, console=console)
    rows.write_bytes(data(logits=np.full(ROWS, 7)))
    with pytest.raises(BadInput, match=r"expected classes 0\.\.2, got 7"):
        dry_run(address, "net", rows, notify=said.append, console=console)
    assert said == [] and place.left() == before and place.woken == []
    assert len(place.client.fine_tuning.jobs.list(limit=1000).data) == jobs


def test_a_file_goes_up_is_read_back_listed_and_deleted(place: Place) -> None:
    content = data()
    made = place.client.files.create(file=("räksmörgås.safetensors", content), purpose="fine-tune")
    assert made.id.startswith("file-")
    assert (made.bytes, made.filename, made.purpose) == (len(content), "räksmörgås.safetensors", "fine-tune")
    assert place.client.files.retrieve(made.id) == made
    assert place.client.files.content(made.id).read() == content
    assert made.id in [file.id for file in place.client.files.list(purpose="fine-tune")]
    digest = hashlib.sha256(content).hexdigest()
    assert (place.files.folder / digest).read_bytes() == content
    assert place.client.files.delete(made.id).deleted
    assert digest not in place.left()
    with pytest.raises(openai.NotFoundError, match=f"no file '{made.id}'"):
        place.client.files.retrieve(made.id)


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end_and_closed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delete comes before the first byte is sent."""
    content, opened, find = data(), list[OpenedFile](), place.kept.opened
    id = place.upload(content)

    def then_deleted(id: str, owners: Owners) -> tuple[FileRecord, OpenedFile]:
        record, file = find(id, owners)
        opened.append(file)
        place.kept.delete(id)
        return record, file

    monkeypatch.setattr(place.kept, "opened", then_deleted)
    assert place.client.files.content(id).read() == content
    assert hashlib.sha256(content).hexdigest() not in place.left()
    until(lambda: opened[0].handle.closed)
    with pytest.raises(openai.NotFoundError, match=f"no file '{id}'"):
        place.client.files.content(id)


def test_a_file_is_read_where_an_expired_one_cannot_be_deleted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise DiskFull("the disk is full")

    file, files = place.upload(), place.client.files
    monkeypatch.setattr(place.kept, "delete_expired", full)
    assert files.retrieve(file).id == file and file in [one.id for one in files.list()]
    assert len(files.content(file).read()) > 0


def test_files_are_listed_page_by_page(place: Place) -> None:
    made = [place.upload() for _ in range(5)]
    assert [file.id for file in place.client.files.list(limit=2)][:5] == made[::-1]
    rising = [file.id for file in place.client.files.list(limit=2, order="asc")]
    assert rising[-5:] == made and len(set(rising)) == len(rising)


def test_a_page_behind_a_file_of_another_purpose_is_answered(place: Place) -> None:
    first, second = place.upload(), place.upload()
    assert second not in [file.id for file in place.client.files.list(after=second)]
    assert first in [file.id for file in place.client.files.list(after=second, purpose="fine-tune")]
    assert place.client.files.list(after=first, purpose="assistants").data == []


@pytest.mark.slow
def test_requests_that_wait_for_files_to_be_read_leave_threads_to_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on = threading.Semaphore(0), threading.Event()

    def read(self: JobAdmission, asked: Any, permit: Any) -> Any:
        waits.release()
        assert goes_on.wait(PATIENCE_S)
        raise BadInput("read at last")

    monkeypatch.setattr(JobAdmission, "read", read)
    validated = f"http://{place.address}/v1/fine_tuning/jobs/validate"
    with ThreadPoolExecutor(MOST) as callers:
        try:
            waiting = [callers.submit(posted, place, b"{}") for _ in range(MOST)]
            assert all(waits.acquire(timeout=PATIENCE_S) for _ in waiting)
            for refused in (posted(place, b"{}"), httpx.post(validated, json={})):
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
                assert "wait for the files of jobs to be read" in refused.text
            assert httpx.get(f"http://{place.address}/v1/fine_tuning/jobs").status_code == 200
        finally:
            goes_on.set()
        assert [one.result().status_code for one in waiting] == [400] * MOST
    assert posted(place, b"{}").status_code == 400, "there is room again"


@pytest.mark.slow
def test_a_job_is_made_in_openai_s_shape_and_its_numbers_are_settled(place: Place) -> None:
    woken = len(place.woken)
    hyperparameters: Any = {"n_epochs": 4, "batch_size": "auto", "learning_rate": 0.01, "precision": "bf16"}
    file = place.upload()
    job = place.client.fine_tuning.jobs.create(
        model="net",
        training_file=file,
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        seed=11,
        suffix="mine",
        metadata={"lot": "7"},
    )
    assert job.id.startswith("ftjob-") and job.object == "fine_tuning.job"
    assert (job.status, job.model, job.seed, job.training_file) == ("queued", "net", 11, file)
    assert (job.metadata, job.error, job.fine_tuned_model, job.finished_at) == (
        {"lot": "7"},
        None,
        None,
        None,
    )
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (4, 2)
    settled = place.job_store.job(job.id).hyperparameters
    assert (settled["learning_rate"], settled["precision"], settled["growth_interval"]) == (0.01, "bf16", 20)
    assert "auto" not in settled.values()
    assert (job.model_extra or {})["halfeven"]["parent_version"] == 2
    found = (job.model_extra or {})["halfeven"].pop("findings")
    assert place.client.fine_tuning.jobs.retrieve(job.id) == job
    assert [event.message for event in place.job_store.events(job.id) if event.level == "warn"] == found[::-1]
    assert len(place.woken) == woken + 1


@pytest.mark.slow
def test_a_version_may_be_named_and_a_validation_file_leaves_all_rows_for_training(place: Place) -> None:
    job = place.create(model="net@1", validation_file=place.upload(), hyperparameters={"batch_size": 1000})
    assert (job.model, job.hyperparameters.batch_size) == ("net@1", ROWS)
    assert place.job_store.job(job.id).parent_version == 1


@pytest.mark.slow
def test_classes_that_the_rows_to_train_on_lack_are_named_when_a_job_is_made(place: Place) -> None:
    job = place.create(training_file=place.upload(data(logits=np.full(ROWS, 1))))
    (finding,) = job.model_extra["halfeven"]["findings"]
    assert "lack 2 of the 3 classes of output 'logits': 0, 2;" in finding
    warned = [event for event in place.client.fine_tuning.jobs.list_events(job.id) if event.level == "warn"]
    assert [event.message for event in warned] == [finding]


@pytest.mark.slow
def test_bad_rows_are_left_out_and_named_where_the_job_says_so(place: Place) -> None:
    rows = arrays()
    rows["x"][[2, 5], 0], rows["x"][7] = np.nan, 1e30
    rows["target:logits"][11] = 3
    hyperparameters: Any = {"bad_rows": "quarantine"}
    job = place.create(training_file=place.upload(save(rows)), hyperparameters=hyperparameters)
    finding = job.model_extra["halfeven"]["findings"][0]
    for words in (
        "row 2: 'x': NaN",
        "row 5: 'x': NaN",
        "row 7: 'x': a number above",
        "row 11: 'target:logits': a class",
    ):
        assert words in finding
    with pytest.raises(openai.BadRequestError, match=r"row 11: expected classes 0\.\.2, got 3"):
        place.create(training_file=place.upload(save(rows)))


@pytest.mark.slow
def test_a_job_is_followed_to_its_model_by_its_events_and_metrics(place: Place) -> None:
    id = place.queued()
    place.job_store.move(id, "running", stage="training")
    place.job_store.note(id, progress={"step": 2, "total_steps": 4}, estimated_finish=2_000_000_000)
    place.job_store.record_steps(id, [{"step": n, "loss": 1 / n, "scale": 65536.0} for n in range(1, 5)])
    for step in range(1, 5):
        place.job_store.record(id, "info", f"step {step}", {"step": step}, "metrics")
    running_job = place.client.fine_tuning.jobs.retrieve(id)
    assert (running_job.status, running_job.estimated_finish) == ("running", 2_000_000_000)
    assert (running_job.model_extra or {})["halfeven"]["progress"] == {"step": 2, "total_steps": 4}
    place.job_store.move(id, "succeeded", fine_tuned_model="net@3", version=3, message="net@3 is active")
    done = place.client.fine_tuning.jobs.retrieve(id)
    assert (done.status, done.fine_tuned_model) == ("succeeded", "net@3")
    assert done.finished_at is not None and done.finished_at >= done.created_at

    events = list(place.client.fine_tuning.jobs.list_events(id, limit=2))
    assert [(event.model_extra or {})["number"] for event in events] == [7, 6, 5, 4, 3, 2, 1]
    assert (events[0].message, events[0].level, events[0].type) == ("net@3 is active", "info", "message")
    assert (events[1].type, events[1].data) == ("metrics", {"step": 4})
    first = httpx.get(f"http://{place.address}/v1/fine_tuning/jobs/{id}/events?order=asc&limit=3").json()
    assert [event["number"] for event in first["data"]] == [1, 2, 3] and first["has_more"] is True
    metrics = httpx.get(f"http://{place.address}/v1/fine_tuning/jobs/{id}/metrics").json()["data"]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4] and metrics[3]["loss"] == 0.25
    page = httpx.get(f"http://{place.address}/v1/fine_tuning/jobs/{id}/page")
    assert page.status_code == 200 and id in page.text and "step 4" in page.text


@pytest.mark.slow
def test_a_failed_job_tells_its_reason(place: Place) -> None:
    id = place.queued()
    place.job_store.move(id, "running")
    place.job_store.move(id, "failed", code="SCALE_COLLAPSE", message="the loss scale fell to its floor")
    job = place.client.fine_tuning.jobs.retrieve(id)
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("SCALE_COLLAPSE", "the loss scale fell to its floor")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["failed", "succeeded"])
def test_no_message_of_a_job_names_the_server_s_folders(place: Place, to: Any) -> None:
    id, digest = place.queued(), "a" * 64
    trace = f'  File "/srv/code/{digest}/net.py", line 3, in forward'
    place.job_store.move(id, "running")
    place.job_store.record(id, "warn", f"/srv/store/files/{digest} cannot be read\n{trace}")
    place.job_store.move(id, to, code="DIVERGED", message=f"in /srv/store/jobs/{id}/train.log", version=3)
    root = f"http://{place.address}/v1/fine_tuning/jobs"
    answers = [httpx.get(f"{root}/{id}{end}").text for end in ("", "/events", "/events?stream=true", "/page")]
    assert all("train.log" in answer and "/srv" not in answer for answer in answers)
    assert all(f"{digest} cannot be read" in answer and "net.py" in answer for answer in answers[1:])


@pytest.mark.slow
def test_jobs_are_listed_page_by_page_and_chosen_by_metadata(place: Place) -> None:
    file = place.upload()
    made = [place.queued(file, metadata={"list": str(n % 2)}) for n in range(5)]
    assert [job.id for job in place.client.fine_tuning.jobs.list(limit=2)][:5] == made[::-1]
    assert [job.id for job in place.client.fine_tuning.jobs.list(limit=1, metadata={"list": "1"})] == [
        made[3],
        made[1],
    ]
    with pytest.raises(openai.BadRequestError, match="at most 16 pairs"):
        place.client.fine_tuning.jobs.list(metadata={str(n): "" for n in range(1000)})


@pytest.mark.slow
def test_a_queued_job_is_cancelled_and_a_finished_one_gives_its_state(place: Place) -> None:
    waiting, finished = place.queued(), place.queued()
    assert place.client.fine_tuning.jobs.cancel(waiting).status == "cancelled"
    assert place.client.fine_tuning.jobs.cancel(waiting).status == "cancelled"
    place.job_store.move(finished, "running")
    woken = len(place.woken)
    assert place.client.fine_tuning.jobs.cancel(finished).status == "running"
    assert place.job_store.job(finished).cancel_requested and len(place.woken) == woken + 1
    events = place.job_store.events(finished)
    assert place.client.fine_tuning.jobs.cancel(finished).status == "running"
    assert place.job_store.events(finished) == events, "asked twice is asked once"
    place.job_store.move(finished, "succeeded", fine_tuned_model="net@3")
    assert place.client.fine_tuning.jobs.cancel(finished).status == "succeeded"


@pytest.mark.slow
def test_a_file_that_a_waiting_job_needs_stays(place: Place) -> None:
    file = place.upload()
    id = place.queued(file)
    with pytest.raises(openai.BadRequestError, match=f"needed by job {id}"):
        place.client.files.delete(file)
    place.client.fine_tuning.jobs.cancel(id)
    assert place.client.files.delete(file).deleted
    assert place.client.fine_tuning.jobs.retrieve(id).training_file == file


@pytest.mark.slow
def test_no_new_job_is_made_of_a_file_that_has_expired_and_waits_for_an_older_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    life: Any = {"anchor": "created_at", "seconds": 3600}
    file = place.client.files.create(file=("train", data()), purpose="fine-tune", expires_after=life).id
    place.queued(file)
    expired = place.job_store._now() + 3600
    monkeypatch.setattr(place.job_store, "_now", lambda: expired)
    with pytest.raises(openai.NotFoundError, match=f"file '{file}' has expired"):
        place.create(training_file=file)


def test_what_is_not_there_is_a_404_that_says_so(place: Place) -> None:
    jobs = place.client.fine_tuning.jobs
    asking = [
        lambda: jobs.retrieve("ftjob-none"),
        lambda: jobs.cancel("ftjob-none"),
        lambda: jobs.list_events("ftjob-none"),
        lambda: jobs.checkpoints.list("ftjob-none"),
        lambda: jobs.list(after="ftjob-none"),
        lambda: place.client.files.retrieve("file-none"),
        lambda: place.client.files.content("file-none"),
        lambda: place.client.files.delete("file-none"),
        lambda: place.create(training_file="file-none"),
        lambda: place.create(model="none"),
        lambda: place.create(model="../net"),
        lambda: place.create(model="net@99"),
        lambda: place.create(model="net@" + "0" * 17 + "12"),  # eighteen digits of which would be version 1
        lambda: place.create(model="net@latest"),
    ]
    for ask in asking:
        with pytest.raises(openai.NotFoundError, match=r"none|net") as caught:
            ask()
        assert caught.value.code == "not_found"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mute", r"'mute' has no output that can be learnt.*'best' \(INT64, kind indices\)"),
        ("bare", "bare@1 has no weights.safetensors"),
        ("idle", "'idle' has no active version.*idle@N"),
    ],
)
def test_a_version_that_cannot_learn_is_refused(place: Place, model: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        place.create(model=model)


def test_an_impossible_hyperparameter_is_refused_with_its_name(place: Place) -> None:
    """Each is claimed in jobs/choices/test_hyperparameters.py."""
    asked = {"model": "net", "training_file": "file-x", "hyperparameters": {"learning_rate": float("inf")}}
    answer = posted(place, json.dumps(asked).encode())
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (400, "bad_hyperparameter")
    assert "hyperparameters: learning_rate: " in problem["detail"] and "got inf" in problem["detail"]
    assert problem["error"]["param"] == "learning_rate"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"training_file": "f"}, "model"),
        ({"model": "net"}, "training_file"),
        ({"model": 3, "training_file": "f"}, "model"),
        ({"model": "net", "training_file": "f", "seed": -1}, "seed"),
        ({"model": "net", "training_file": "f", "seed": "one"}, "seed"),
        ({"model": "net", "training_file": "f", "suffix": "x" * 65}, "suffix"),
        ({"model": "net", "training_file": "f", "metadata": {"a": 1}}, "metadata"),
        ({"model": "net", "training_file": "f", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"model": "net", "training_file": "f", "hyperparameters": [1]}, "hyperparameters"),
        ({"model": "net", "training_file": "f", "method": {"type": "dpo"}}, "method"),
        ({"model": "net", "training_file": "f", "integrations": [{"type": "wandb"}]}, "integrations"),
        ({"model": "net", "train_file": "f"}, "train_file"),
        ([], None),
        ("net", None),
    ],
)
def test_a_request_that_is_none_names_its_part(place: Place, body: Any, param: str | None) -> None:
    answer = posted(place, json.dumps(body).encode())  # infinities too
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("name", ["n_epochs", "epochs", "lr", "momentum", "fp16"])
def test_a_setting_beside_the_hyperparameters_is_refused_with_its_place(place: Place, name: str) -> None:
    said = posted(place, json.dumps({"model": "net", "training_file": "f", name: 1}).encode()).json()
    assert said["error"]["param"] == name
    assert f'{name}: is a setting: expected it in {{"hyperparameters": {{"{name}": …}}}}' in said["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_is_refused(place: Place, body: bytes) -> None:
    assert posted(place, body).status_code == 400


@pytest.mark.slow
def test_data_that_do_not_fit_are_refused_at_once_with_tensor_and_rows(place: Place) -> None:
    """Each fault of a file is claimed in data/test_datasets.py."""
    x = arrays()["x"]
    x[[3, 17]] = np.nan
    file, before = place.upload(data(x=x), "rows.bin"), len(place.job_store.jobs(limit=1000))
    words = rf"training_file 'rows.bin' \({file}\): tensor 'x', rows 3, 17: expected finite numbers"
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        place.create(training_file=file)
    assert (caught.value.code, caught.value.param) == ("bad_training_file", "training_file")
    assert len(place.job_store.jobs(limit=1000)) == before


@pytest.mark.slow(seconds=4)
def test_a_validation_file_with_rows_of_the_training_file_is_refused(place: Place) -> None:
    train, other = arrays(), arrays()
    other["x"][6] = train["x"][0]
    file = place.upload(save(train))
    with pytest.raises(openai.BadRequestError, match="validation_file: row 6") as caught:
        place.create(training_file=file, validation_file=place.upload(save(other)))
    assert caught.value.param == "validation_file"


@pytest.mark.slow(seconds=6)
def test_one_key_is_one_job_under_eight_at_once_and_after_its_file_has_gone(place: Place) -> None:
    file = place.upload()
    key = {"Idempotency-Key": f"key of {file}"}
    together = threading.Barrier(8)

    def create(_: int) -> str:
        together.wait(PATIENCE_S)
        return place.create(training_file=file, extra_headers=key).id

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(create, range(8)))
    assert len(ids) == 1
    assert sum(job.training_file == file for job in place.job_store.jobs(limit=1000)) == 1
    with pytest.raises(openai.BadRequestError, match="with another request"):
        place.create(training_file=file, seed=5, extra_headers=key)
    (id,) = ids
    other = place.create(training_file=file, extra_headers={"Idempotency-Key": f"another of {file}"}).id
    assert other != id
    for one in (id, other):
        place.client.fine_tuning.jobs.cancel(one)
    place.client.files.delete(file)
    assert place.create(training_file=file, extra_headers=key).id == id


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_a_key_that_is_none_is_refused(place: Place, key: str) -> None:
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key: expected 1 to 255"):
        place.create(extra_headers={"Idempotency-Key": key})


@pytest.mark.slow
def test_a_repeated_request_is_answered_while_the_files_of_another_one_are_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"model": "net", "training_file": place.upload()}
    key, read = {"Idempotency-Key": f"key of {request['training_file']}"}, JobAdmission.read
    id = place.create(**request, extra_headers=key).id
    reads, goes_on = threading.Event(), threading.Event()

    def slow(self: JobAdmission, asked: Any, permit: Any) -> Any:
        reads.set()
        assert goes_on.wait(PATIENCE_S)
        return read(self, asked, permit)

    monkeypatch.setattr(JobAdmission, "read", slow)
    with ThreadPoolExecutor(1) as other:
        try:
            waiting = other.submit(place.create, extra_headers={"Idempotency-Key": f"another of {id}"})
            assert reads.wait(PATIENCE_S)
            assert posted(place, json.dumps(request).encode(), **key).json()["id"] == id
        finally:
            goes_on.set()
        assert waiting.result(PATIENCE_S).id != id


DEEP = b'{"metadata": ' + b"[" * 300 + b"]" * 300 + b"}"


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_a_request_that_is_nested_too_deep_is_refused_before_a_file_is_read(
    known: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"Idempotency-Key": f"key of {place.upload()}"}
    if known:
        place.create(extra_headers=key)
    monkeypatch.setattr(JobAdmission, "read", lambda *_: pytest.fail("nothing must be read"))
    refused = posted(place, DEEP, **key)
    assert refused.status_code == 400 and "nesting depth" in refused.json()["detail"]


@pytest.mark.slow
def test_a_number_beyond_64_bits_beside_a_nan_is_refused_as_any_other_odd_seed(place: Place) -> None:
    asked = b'{"model": "net", "training_file": "%s", "seed": 18446744073709551616, "suffix": NaN}'
    refused = posted(place, asked % place.upload().encode(), **{"Idempotency-Key": "odd"})
    assert refused.status_code == 400


@pytest.mark.slow
def test_the_client_pauses_and_resumes_and_a_finished_job_is_a_conflict(place: Place) -> None:
    jobs, id = place.client.fine_tuning.jobs, place.queued()
    assert jobs.pause(id).status == "paused" == jobs.retrieve(id).status
    woken = len(place.woken)
    assert jobs.resume(id).status == "queued" and len(place.woken) == woken + 1
    place.job_store.move(id, "running")
    assert (jobs.pause(id).model_extra or {})["halfeven"]["pause_requested"] is True
    place.job_store.move(id, "succeeded", fine_tuned_model="net@3")
    for ask in (jobs.pause, jobs.resume):
        with pytest.raises(openai.ConflictError, match=f"{id} is succeeded"):
            ask(id)
        with pytest.raises(openai.NotFoundError, match="ftjob-none"):
            ask("ftjob-none")


def events_of(answer: httpx.Response) -> list[tuple[str, str, dict[str, Any]]]:
    """(id, type, data) of each server-sent event."""
    found = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["id"], lines["event"], json.loads(lines["data"])))
    return found


@pytest.mark.slow
def test_events_are_streamed_until_the_job_ends_and_go_on_behind_the_last_one_seen(place: Place) -> None:
    id = place.queued()
    address = f"http://{place.address}/v1/fine_tuning/jobs/{id}/events"
    listens = {"accept": "text/event-stream"}
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=PATIENCE_S) as client:
        with client.stream("GET", address, headers=listens) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            first = next(line for line in stream.iter_lines() if line.startswith("id: "))[len("id: ") :]
        later = pool.submit(client.get, address, headers={**listens, "last-event-id": first})
        place.job_store.move(id, "running")
        place.job_store.record(id, "info", "step 1", {"loss": 0.5}, kind="metrics")
        place.job_store.move(id, "failed", code="DIVERGED", message="line\nbreaks stay inside")
        answer = later.result(PATIENCE_S)
    found = events_of(answer)
    assert [kind for _, kind, _ in found] == ["message", "metrics", "message"]
    assert [data["number"] for _, _, data in found] == [2, 3, 4] and found[1][2]["data"] == {"loss": 0.5}
    assert found[2][2]["message"] == "line\nbreaks stay inside"
    assert [name for name, _, _ in found] == [data["id"] for _, _, data in found]
    last = {**listens, "last-event-id": found[-1][0]}
    assert httpx.get(address, headers=last).status_code == 204, "nothing will come: do not ask again"
    assert len(events_of(httpx.get(f"{address}?stream=true"))) == 4
    for wrong in ("ftevent-of-another-1", "7"):
        assert httpx.get(address, headers={**listens, "last-event-id": wrong}).status_code == 404


@pytest.mark.slow
def test_a_stream_ends_when_the_server_leaves(place: Place) -> None:
    address = f"http://{place.address}/v1/fine_tuning/jobs/{place.queued()}/events?stream=true"
    place.leaving.append("leaving")
    try:
        assert events_of(httpx.get(address, timeout=PATIENCE_S))
    finally:
        place.leaving.clear()


@pytest.mark.slow
def test_checkpoints_are_listed_page_by_page_with_their_losses(place: Place) -> None:
    jobs, id = place.client.fine_tuning.jobs, place.queued()
    for step in (5, 10, 15):
        record = {"step": step, "loss": 1 / step, "held_out_loss": 2 / step, "best": step == 5}
        place.job_store.record_evaluation(id, record)
    found = list(jobs.checkpoints.list(id, limit=2))
    assert [one.step_number for one in found] == [15, 10, 5]
    assert [(one.metrics.train_loss, one.metrics.valid_loss) for one in found] == [
        (1 / step, 2 / step) for step in (15, 10, 5)
    ]
    assert {one.fine_tuning_job_id for one in found} == {id}
    place.job_store.move(id, "running")
    place.job_store.move(id, "succeeded", fine_tuned_model="net@3", summary={"best_step": 5})
    named = {one.step_number: one.fine_tuned_model_checkpoint for one in jobs.checkpoints.list(id)}
    assert named == {5: "net@3", 10: f"{id}:step-10", 15: f"{id}:step-15"}
    with pytest.raises(openai.NotFoundError, match="no checkpoint 'ftckpt-x-5'"):
        jobs.checkpoints.list(id, after="ftckpt-x-5")


@pytest.mark.parametrize("query", ["limit=0", "limit=100000000", "limit=many"])
def test_a_page_has_a_sensible_size(place: Place, query: str) -> None:
    assert httpx.get(f"http://{place.address}/v1/fine_tuning/jobs?{query}").status_code == 400


def test_the_steps_of_a_job_are_answered_as_they_are_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = place.queued()
    steps = [{"step": n, "loss": 1 / n if n > 1 else float("nan"), "cause": 'ä"\n'} for n in range(1, 4)]
    place.job_store.record_steps(id, steps)
    expected = {"object": "list", "data": place.job_store.steps(id)}
    monkeypatch.delattr(JobStore, "steps")
    found, more = (
        httpx.get(f"http://{place.address}/v1/fine_tuning/jobs/{id}/metrics?most={most}")
        for most in (10_000, 10_001)
    )
    assert found.json() == expected and found.content == more.content == orjson.dumps(expected)
