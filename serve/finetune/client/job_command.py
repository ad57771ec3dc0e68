"""``halfeven finetune``: send the data, ask for the job, and watch it until it ends."""

import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ....models.errors import BadInput, HalfevenError, NotReady
from ..jobs.records.job_types import FINAL, had_bad_data, not_active, was_refused
from .remote import Remote

POLL_S = 0.3
PATIENCE_S = 30.0  # how long a server may be away (restarting, say) before we stop watching
CANCEL_S = 15.0  # how long we wait for a cancelled job to end
_COLUMNS = ("{task.description}", "{task.fields[facts]}")

Notify = Callable[[str], None]
Job = Mapping[str, Any]


def fine_tune(
    server: str | Remote,
    name: str,
    file: Path,
    *,
    validation: Path | None = None,
    suffix: str | None = None,
    seed: int | None = None,
    hyperparameters: Mapping[str, object] | None = None,
    follow: bool = True,
    notify: Notify,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Fine-tune ``name`` (or ``name@version``) on a file at a running server (its URL); the job's facts at its end.

    ``hyperparameters`` that are None are left to the server. With ``follow`` the job is watched with a bar on
    stderr, and Ctrl-C asks the server to cancel it. Raises BadInput with the server's words where it refuses
    the file or the job, NotReady where no server answers.
    """
    remote = server if isinstance(server, Remote) else Remote(server)
    console = console or Console(stderr=True, highlight=False, emoji=False)
    with JobBar(console) as bar:
        request = job_request(name, suffix, seed, hyperparameters or {})
        with refused_files_deleted(remote, notify) as sent:
            request |= upload_files(remote, file, validation, bar, sent)
            job = create_job(remote, request, sleep)
        notify(f"job {job['id']} is created")
        for finding in (job.get("halfeven") or {}).get("findings") or ():
            notify(f"note: {finding}")
        if follow:
            (job,) = Watch(remote, bar, notify, clock, sleep).until_they_end([job])
    return facts_of(job, remote.url)


@contextmanager
def refused_files_deleted(remote: Remote, notify: Notify) -> Iterator[list[str]]:
    """Gives a list for the identifiers of the files that are uploaded inside. Where the server refuses a file or the
    request (BadInput), these files are deleted on the server."""
    sent: list[str] = []
    try:
        yield sent
    except BadInput:
        delete_files(remote, sent, notify)
        raise


def delete_files(remote: Remote, ids: Iterable[str], notify: Notify) -> None:
    """Delete files on the server, or say that they stay there."""
    for id in ids:
        try:
            remote.delete_file(id)
        except HalfevenError as error:  # a key for some models only may not delete
            notify(f"the file {id} stays on the server: {error}")


def upload_files(
    remote: Remote, file: Path, validation: Path | None, bar: "JobBar", sent: list[str]
) -> dict[str, str]:
    """The fields ``training_file`` and ``validation_file`` of a request. Each identifier joins ``sent`` as soon as its
    file is on the server."""
    fields: dict[str, str] = {}
    for field, path in (("training_file", file), ("validation_file", validation)):
        if path is not None:
            sent.append(_upload_rows(remote, path, bar))
            fields[field] = sent[-1]
    return fields


def _upload_rows(remote: Remote, file: Path, bar: "JobBar") -> str:
    """The id of the uploaded file; of a folder of pictures its tar is sent."""
    if not file.is_dir():
        return remote.upload(file, bar.sent)["id"]
    from ....models.pictures.picture import SUFFIXES

    # The first pattern enters no folder that is a link.
    found = {*file.glob("**/*"), *file.glob("*/*")}
    pictures = sorted(path for path in found if path.suffix.lower() in SUFFIXES and path.is_file())
    if not pictures:
        raise BadInput(
            f"{file} is a folder without pictures; expected one file of rows, or a folder of pictures"
        )
    with tempfile.TemporaryDirectory(prefix="halfeven-pictures-") as folder:
        packed = Path(folder) / f"{file.resolve().name}.tar"
        with tarfile.open(packed, "w", dereference=True) as archive:  # the server takes no links
            for picture in pictures:
                archive.add(picture, picture.relative_to(file), recursive=False)
        return remote.upload(packed, bar.sent)["id"]


def job_request(
    name: str, suffix: str | None, seed: int | None, hyperparameters: Mapping[str, object]
) -> dict[str, Any]:
    set_ones = {key: value for key, value in hyperparameters.items() if value is not None}
    request = {"model": name, "suffix": suffix, "seed": seed, "hyperparameters": set_ones or None}
    return {key: value for key, value in request.items() if value is not None}


def create_job(remote: Remote, request: Mapping[str, Any], sleep: Callable[[float], None]) -> dict[str, Any]:
    """One job, however often its creation has to be sent: the key says that it is the same wish."""
    key = uuid.uuid4().hex
    for _ in range(2):
        try:
            return remote.create(request, key)
        except NotReady:
            sleep(1.0)
    return remote.create(request, key)


class Watch:
    """Reads the job until it ends; a server that is away for a moment does not end the watching."""

    def __init__(
        self,
        remote: Remote,
        bar: "JobBar",
        notify: Notify,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._remote, self._bar, self._notify = remote, bar, notify
        self._clock, self._sleep = clock, sleep

    def until_they_end(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs in their last state; after Ctrl-C, in the state that they have ``CANCEL_S`` seconds later."""
        ended: list[Job] = []
        try:
            for job in jobs:
                ended.append(self._follow(job, None))
        except KeyboardInterrupt:  # those that wait first: they would begin where one before them ends
            ended += reversed([self._cancel(job) for job in reversed(jobs[len(ended) :])])
        return ended

    def _follow(self, job: Job, most_s: float | None) -> Job:
        began = last_seen = self._clock()
        while True:
            self._bar.show(job)
            now = self._clock()
            if job["status"] in FINAL or (most_s is not None and now - began > most_s):
                return job
            self._sleep(POLL_S)
            try:
                job, last_seen = self._remote.job(job["id"]), self._clock()
            except NotReady as error:
                if self._clock() - last_seen > PATIENCE_S:
                    raise NotReady(f"{error} (the job {job['id']} may still run there)") from None

    def _cancel(self, job: Job) -> Job:
        try:
            job = self._remote.cancel(job["id"])
        except HalfevenError as error:
            self._notify(f"interrupted, and job {job['id']} could not be cancelled: {error}")
            raise KeyboardInterrupt from None
        self._notify(f"interrupted: the server was asked to cancel job {job['id']}")
        job = self._follow(job, CANCEL_S)
        if job["status"] not in FINAL:
            self._notify(
                f"job {job['id']} is still {job['status']}; the server stops it after its current step"
            )
        return job


class JobBar:
    """One live line on stderr: bytes while sending, then step, loss, scale, skipped steps and what is left. Without a
    terminal a line for each stage, and for each tenth of the steps."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed = console, ("", 0)
        description, facts = (TextColumn(column, markup=False) for column in _COLUMNS)
        self._progress = Progress(
            description, BarColumn(24), facts, console=console, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("sending", total=None, facts="")

    def __enter__(self) -> "JobBar":
        self._progress.start()
        if not self._console.is_terminal:
            self._console.print("sending")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def sent(self, done: int, total: int) -> None:
        facts = f"{done / 2**20:.1f} of {total / 2**20:.1f} MiB"
        self._progress.update(self._task, completed=done, total=max(total, 1), facts=facts)

    def show(self, job: Job) -> None:
        stage, facts, done, total = described(job)
        self._progress.update(
            self._task, description=stage, completed=done, total=total, facts=facts, refresh=True
        )
        tenth = 10 * done // total if total else 0
        if not self._console.is_terminal and self._printed != (stage, tenth):
            self._printed = stage, tenth
            self._console.print(f"{stage}: {facts}" if facts else stage, markup=False)


def described(job: Job) -> tuple[str, str, int, int | None]:
    """A job for one line: its stage, its numbers, steps done and in all (None: not known yet)."""
    ours = job.get("halfeven") or {}
    seen = ours.get("progress") or {}
    running = job["status"] == "running"
    stage = (ours.get("stage") or "running") if running else job["status"]
    if not seen.get("total_steps"):
        return stage, "", int(job["status"] in FINAL), 1 if job["status"] in FINAL else None
    words = [f"step {seen.get('step') or 0}/{seen['total_steps']}", f"loss {_number(seen.get('loss'))}"]
    words += [f"scale {_number(seen.get('scale'))}", f"skipped {seen.get('skipped') or 0}"]
    if running and stage == "training" and seen.get("eta_seconds") is not None:
        words.append(f"{_duration(seen['eta_seconds'])} left")
    return stage, " · ".join(words), int(seen.get("step") or 0), int(seen["total_steps"])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if abs(value) < 1024 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02} s"


def facts_of(job: Job, url: str) -> dict[str, Any]:
    """The facts that ``--json`` prints: the final state, the new version, the gate's numbers, the reason of a
    failure."""
    ours = job.get("halfeven") or {}
    return {
        "job": job["id"],
        "status": job["status"],
        "model": job["model"],
        "fine_tuned_model": job.get("fine_tuned_model"),
        "parent_version": ours.get("parent_version"),
        "error": job.get("error"),
        "promotion": ours.get("promotion"),
        "gate": ours.get("gate"),
        "summary": ours.get("summary"),
        "hyperparameters": job.get("hyperparameters"),
        "page": f"{url}/v1/fine_tuning/jobs/{job['id']}/page",
    }


def exit_code(facts: Mapping[str, Any], follow: bool = True) -> int:
    """0 active; 3 refused by parity or gate, held or not promoted; 2 the data do not fit; 1 anything else.

    Without ``follow`` the command ends once the server has the job: 0 unless it has failed by then.
    """
    ours = {"gate": facts["gate"], "promotion": facts.get("promotion")}
    job = {"status": facts["status"], "error": facts["error"], "halfeven": ours}
    if not_active(job):
        return 3
    if facts["status"] == "succeeded" or (not follow and facts["status"] not in FINAL):
        return 0
    return 3 if was_refused(job) else 2 if had_bad_data(job) else 1


def measured(gate: Mapping[str, Any] | None) -> str:
    """The metrics on each set before and after, of the form that the gate lists first."""
    before = (gate or {}).get("active") or {}
    form = next(iter(((gate or {}).get("forms") or {}).values()), {})
    places = {"held_out": "held-out rows", "judging": "judging set"}
    words = [
        f"; on the {places.get(name, name)} {metric} of '{output}' {_number(old)} → {_number(facts['metrics'][metric])}"
        for name, outputs in form.items()
        for output, facts in outputs.items()
        for metric, old in before[name][output]["metrics"].items()
    ]
    return "".join(words)


def sentence_of(facts: Mapping[str, Any]) -> str:
    """The end of a job as a sentence for people."""
    promotion = facts.get("promotion") or {}
    page = f"; its page: {facts['page']}" if facts["page"] else ""
    if promotion.get("state") in ("held", "not promoted"):
        return f"{promotion['message']}{page}"
    if facts["status"] == "succeeded":
        return f"{facts['fine_tuned_model']} is active{measured(facts.get('gate'))}{page}"
    error = facts.get("error") or {}
    why = f": {error['message']}" if error.get("message") else ""
    return f"job {facts['job']} {facts['status']}{why}{page}"
