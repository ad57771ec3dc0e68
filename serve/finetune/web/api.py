"""The fine-tuning routes, in OpenAI's shapes: files, jobs, events; and our metrics and page beside them.

A reply is sent when the change that it confirms is on the disk. Blocking work is done in threads, never on the event
loop.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ....models.errors import BadInput
from ....models.store.store import Store
from ...access.access_control import Permit
from ...http.caller import json_answer, lease_of, read_order
from ...http.codecs.json_numbers import parse
from ...http.limits.request_limits import DEFAULTS
from ...http.limits.shared_places import SharedPlaces
from ...http.page_headers import own_page
from ...http.route_scopes import TO_TRAIN, permit_of
from ..data.files import IN_MEMORY
from ..data.kept_files import MOST_FILES, KeptFiles
from ..jobs.job_admission import JobAdmission, checked_metadata
from ..jobs.records.job_store import JobStore
from ..jobs.records.job_types import JobRequest, JobRow, step_of
from .event_stream import HeldStream, open_streams, streamed
from .openai_shapes import checkpoint_body, event_body, file_body, job_body, page_of

JOBS = "/v1/fine_tuning/jobs"
SHOWN_JOBS = 100  # on a page, the newest
_MOST_EVENTS = 1000
_MOST_STEPS = 10_000  # in one answer
_CHUNK = 2**20

Limit = Annotated[int, Query(ge=1, le=1000)]


def router(
    job_store: JobStore, kept: KeptFiles, store: Store, wake: Callable[[], None], leaving: Callable[[], bool],
    try_out: Callable[[JobRequest, bool], dict[str, Any]],
) -> APIRouter:  # fmt: skip
    """Every route under ``/v1/files`` and ``/v1/fine_tuning``. ``wake`` is called, from any thread, after a job
    was created, resumed or is to be cancelled. ``leaving``: whether the server is shutting down. ``try_out``: what is
    found out of an admitted job before it is created (`jobs/trial_run.py`)."""
    routes = APIRouter(tags=["fine-tuning"])
    _add_changes_of_files(routes, kept)
    _add_files(routes, job_store, kept)
    admission = JobAdmission(job_store, kept.files, store, leaving)
    # A part of the forty threads that all routes share (Starlette): reading the files of a job may take minutes.
    what = "requests wait for the files of jobs to be read"
    waiting = SharedPlaces(DEFAULTS.orders_being_read, what, "ask again when some were answered", 10.0)
    _add_jobs(routes, job_store, admission, waiting, wake)
    _add_orders(routes, job_store, wake)
    _add_validation(routes, admission, waiting, try_out)
    _add_reading(routes, job_store)
    _add_events(routes, job_store, leaving)
    return routes


def _add_changes_of_files(routes: APIRouter, kept: KeptFiles) -> None:
    @routes.post("/v1/files")
    async def upload(request: Request) -> Response:
        """Upload one file of training rows as `multipart/form-data` with `purpose=fine-tune`; with
        `expires_after[anchor]=created_at` and `expires_after[seconds]` it is deleted by itself."""
        owner = permit_of(request.scope).owner
        await run_in_threadpool(kept.delete_expired)
        with lease_of(request.scope).meanwhile(IN_MEMORY):
            keep, held = partial(kept.keep, owner=owner), partial(kept.bytes_of, owner)
            record = await kept.files.receive(request.scope["headers"], request.receive, keep, owner, held)
        return json_answer(file_body(record))

    @routes.delete("/v1/files/{id}")
    def delete(id: str, request: Request) -> Response:
        """Delete a file; bytes that several files share go with the last of them."""
        kept.delete(id, permit_of(request.scope).owners)
        return json_answer({"id": id, "object": "file", "deleted": True})


def _add_files(routes: APIRouter, job_store: JobStore, kept: KeptFiles) -> None:
    @routes.get("/v1/files")
    def listing(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FILES)] = MOST_FILES,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """Every file that this key may see, the newest first."""
        owners = permit_of(request.scope).owners
        records = job_store.files(owners)
        if order == "asc":
            records.reverse()
        if after is not None:
            known = [record.id for record in records]
            job_store.file(after, owners)  # raises UnknownName
            records = records[known.index(after) + 1 :] if after in known else []
        records = [record for record in records if purpose in (None, record.purpose)]
        return json_answer(page_of(records[: limit + 1], limit, file_body))

    @routes.get("/v1/files/{id}")
    def retrieve(id: str, request: Request) -> Response:
        """One file's facts."""
        return json_answer(file_body(job_store.file(id, permit_of(request.scope).owners)))

    @routes.get("/v1/files/{id}/content")
    def content(id: str, request: Request) -> Response:
        """The bytes of a file."""
        record, opened = kept.opened(id, permit_of(request.scope).owners)
        headers = {"content-length": str(record.bytes), "x-content-type-options": "nosniff"}
        chunks = iter(partial(opened.handle.read, _CHUNK), b"")
        return HeldStream(chunks, opened.close, "application/octet-stream", headers)


def _add_jobs(
    routes: APIRouter, job_store: JobStore, admission: JobAdmission, waiting: SharedPlaces, wake: Callable[[], None]
) -> None:  # fmt: skip
    # New requests with a key are admitted one at a time: of several with one key that come at once, one makes the job,
    # and its files are read once.
    keyed = threading.Lock()

    def admit(body: bytes, key: str | None, permit: Permit) -> Response:
        asked = parse(body)
        permit.check(TO_TRAIN, _model_in(asked))
        if not (key and isinstance(asked, dict)):
            return admitted(asked, key, permit)
        # A repeated request waits for no other one, whose files may take minutes to read.
        if known := job_store.replayed(key, asked, permit.owner):
            return replayed(known)
        with keyed:
            if known := job_store.replayed(key, asked, permit.owner):
                return replayed(known)
            return admitted(asked, key, permit)

    def replayed(known: JobRow) -> Response:
        return json_answer(job_body(known), headers={"idempotent-replayed": "true"})

    def admitted(asked: Any, key: str | None, permit: Permit) -> Response:
        request = admission.read(asked, permit)
        job, created = job_store.create_job(request, key)
        wake()
        made = job_body(job)
        # The findings of admission in the data; later on they are among the events.
        made["halfeven"]["findings"] = list(request.findings)
        return json_answer(made, headers=None if created else {"idempotent-replayed": "true"})

    @routes.post(JOBS)
    async def create(request: Request) -> Response:
        """Create a job; it is on the disk when this answers. `Idempotency-Key`: once however often it is sent."""
        key = _key(request.headers.get("idempotency-key"))
        body = await read_order(request)
        permit = permit_of(request.scope)
        with waiting.take(permit.owner):
            return await run_in_threadpool(admit, body, key, permit)


def _add_orders(routes: APIRouter, job_store: JobStore, wake: Callable[[], None]) -> None:
    @routes.post(JOBS + "/{id}/cancel", dependencies=[_may_see(job_store)])
    def cancel(id: str) -> Response:
        """Cancel a job; of a finished one this is its state."""
        job = job_store.request_cancel(id)
        wake()
        return json_answer(job_body(job))

    @routes.post(JOBS + "/{id}/pause", dependencies=[_may_see(job_store)])
    def pause(id: str) -> Response:
        """Pause a job after its current step, with a checkpoint; 409 for a finished one."""
        return json_answer(job_body(job_store.request_pause(id)))

    @routes.post(JOBS + "/{id}/resume", dependencies=[_may_see(job_store)])
    def resume(id: str) -> Response:
        """Queue a paused job again; on a CPU its result is bit for bit that of one not paused. 409 after its end."""
        job = job_store.request_resume(id)
        wake()
        return json_answer(job_body(job))


def _add_validation(
    routes: APIRouter, admission: JobAdmission, waiting: SharedPlaces,
    try_out: Callable[[JobRequest, bool], dict[str, Any]],
) -> None:  # fmt: skip
    def validate(body: bytes, permit: Permit, compare: bool) -> Response:
        asked = parse(body)
        permit.check(TO_TRAIN, _model_in(asked))
        return json_answer(try_out(admission.read(asked, permit), compare))

    @routes.post(JOBS + "/validate")
    async def validation(request: Request, compare: bool = False) -> Response:
        """Check a job request without creating the job: its data and settings, and two steps of the training; with
        `compare=true` a few steps in each precision."""
        body = await read_order(request)
        permit = permit_of(request.scope)
        with waiting.take(permit.owner):
            return await run_in_threadpool(validate, body, permit, compare)


def _may_see(job_store: JobStore) -> Any:
    """The route's dependency that knows no job of another key (UnknownName), and refuses a key for other models than
    the job's (Forbidden)."""

    def check(id: str, request: Request) -> None:
        permit = permit_of(request.scope)
        permit.check(TO_TRAIN, job_store.job(id, permit.owners).name)

    return Depends(check)


def _model_in(asked: Any) -> str | None:
    """The model that a job's request names; None where it names none, which the job's admission refuses."""
    model = asked.get("model") if isinstance(asked, dict) else None
    return model.partition("@")[0] if isinstance(model, str) else None


def _key(key: str | None) -> str | None:
    if key is not None and not (1 <= len(key) <= DEFAULTS.idempotency_characters and key.isprintable()):
        raise BadInput(
            f"Idempotency-Key: expected 1 to {DEFAULTS.idempotency_characters} printable characters"
        )
    return key


def _add_reading(routes: APIRouter, job_store: JobStore) -> None:
    seen = [_may_see(job_store)]

    @routes.get(JOBS)
    def listing(request: Request, after: str | None = None, limit: Limit = 20) -> Response:
        """Every job that this key may see, the newest first; `metadata[key]=value` chooses. A page has fewer than
        `limit` where the settings of its jobs are long."""
        owners = permit_of(request.scope).owners
        found, more = job_store.page(after, limit, _metadata(request), owners)
        return json_answer(page_of(found, limit, job_body) | {"has_more": more})

    @routes.get(JOBS + "/{id}", dependencies=seen)
    def retrieve(id: str) -> Response:
        """One job: its state, its progress, and at the end its model or its reason."""
        return json_answer(job_body(job_store.job(id)))

    @routes.get(JOBS + "/{id}/metrics", dependencies=seen)
    def metrics(id: str, most: Annotated[int, Query(ge=2, le=100_000)] = 2000) -> Response:
        """Loss, loss scale, gradient norm and skips by step; of more than `most` (at most 10,000) every k-th."""
        # They are answered as they are stored: as objects they would take twenty times the memory.
        steps = [orjson.Fragment(record) for record in job_store.steps_as_json(id, min(most, _MOST_STEPS))]
        return json_answer({"object": "list", "data": steps})

    @routes.get(JOBS + "/{id}/checkpoints", dependencies=seen)
    def checkpoints(id: str, after: str | None = None, limit: Limit = 10) -> Response:
        """The evaluations of a job, the newest first, with their losses; the best one's weights are the version's."""
        job = job_store.job(id)
        before = None if after is None else step_of(id, after)
        found = job_store.evaluations(id, before, limit + 1)
        return json_answer(page_of(found, limit, lambda one: checkpoint_body(job, one)))

    @routes.get(JOBS + "/{id}/page", dependencies=seen)
    def page(id: str) -> Response:
        """A web page of the job."""
        job = job_body(job_store.job(id))
        newest = [event_body(event) for event in job_store.events(id, limit=_MOST_EVENTS)]
        from .job_page import render_job  # brings jinja2: 7 MB that most servers never need

        return own_page(render_job(job, job_store.steps(id), newest[::-1]))

    @routes.get("/jobs", include_in_schema=False)
    def jobs(request: Request) -> Response:
        from .job_page import render_jobs

        found = job_store.jobs(None, SHOWN_JOBS, None, permit_of(request.scope).owners)
        return own_page(render_jobs([job_body(job) for job in found]))


def _add_events(routes: APIRouter, job_store: JobStore, leaving: Callable[[], bool]) -> None:
    streams = open_streams()

    @routes.get(JOBS + "/{id}/events", dependencies=[_may_see(job_store)])
    async def events(
        request: Request, id: str, after: str | None = None, limit: Limit = 20,
        order: Literal["asc", "desc"] = "desc", stream: bool = False,
    ) -> Response:  # fmt: skip
        """The events of a job, the newest first; `order=asc` with `after` continues after the last one seen.

        With `Accept: text/event-stream` or `stream=true` they come as server-sent events, the oldest first, until the
        job has ended; with `Last-Event-ID` (or `after`), only the events after that one."""
        if stream or "text/event-stream" in request.headers.get("accept", ""):
            last = request.headers.get("last-event-id") or after
            return await streamed(job_store, id, last, leaving, streams, permit_of(request.scope))
        found = await run_in_threadpool(job_store.events, id, after, limit + 1, order == "asc")
        return json_answer(page_of(found, limit, event_body))


def _metadata(request: Request) -> dict[str, str] | None:
    """The pairs that a job must have. Raises BadJob for more than a job can have."""
    return checked_metadata(
        {
            name[len("metadata[") : -1]: value
            for name, value in request.query_params.items()
            if name.startswith("metadata[") and name.endswith("]")
        }
    )
