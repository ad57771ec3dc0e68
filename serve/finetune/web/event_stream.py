"""The events of a job as they happen: server-sent events (WHATWG HTML §9.2), which go on from ``Last-Event-ID``."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import ContentStream
from starlette.types import Receive, Scope, Send

from ...access.access_control import OPEN, Permit
from ...http.limits.request_limits import DEFAULTS
from ...http.limits.shared_places import SharedPlaces
from ..jobs.records.job_store import JobStore
from ..jobs.records.job_types import JobEvent
from .openai_shapes import event_body

LOOK_EVERY_S = 0.25
SILENCE_S = 15.0  # then a comment is sent: whatever stands between sees that the connection is in use
_RETRY_AFTER_S = 10.0
_AT_ONCE = 500  # events
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def open_streams(most: int = DEFAULTS.event_streams) -> SharedPlaces:
    """The places of all streams of a server."""
    advice = "ask without `stream` (`order=asc` with `after`), or again when some have ended"
    return SharedPlaces(most, "streams of events are open", advice, _RETRY_AFTER_S)


async def streamed(
    job_store: JobStore, id: str, last: str | None, leaving: Callable[[], bool], streams: SharedPlaces,
    permit: Permit = OPEN,
) -> Response:  # fmt: skip
    """The events behind the event ``last`` (None: all), and each further one until the job has ended.

    The stream ends with the job, where the server is ``leaving`` or the key of the ``permit`` no longer stands; a
    client that comes back then names the last event that it has. Where nothing can come any more the answer is 204, at
    which browsers stop coming back. Raises UnknownName for the job, and for a ``last`` that is no event of it;
    Overloaded and KeyLimitReached.
    """
    place = streams.take(permit.owner)
    try:
        events, ended = await run_in_threadpool(_behind, job_store, id, last)
        if not (ended and not events and last is not None):
            stream = _stream(job_store, id, last, leaving, permit.stands)
            return HeldStream(stream, place.leave, "text/event-stream", _HEADERS)
    except BaseException:
        place.leave()
        raise
    place.leave()
    return Response(status_code=204)


class HeldStream(StreamingResponse):
    """A stream that gives back what it holds (``release``) when it has ended, also where it was never begun."""

    def __init__(
        self, content: ContentStream, release: Callable[[], None], media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._release = weakref.finalize(self, release)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _stream(
    job_store: JobStore, id: str, last: str | None, leaving: Callable[[], bool], stands: Callable[[], bool]
) -> AsyncIterator[bytes]:
    silent_s = 0.0
    while stands():
        events, ended = await run_in_threadpool(_behind, job_store, id, last)
        for event in events:
            yield _written(event)
            last = event.id
        if not events:
            if ended or leaving():
                return
            await asyncio.sleep(LOOK_EVERY_S)
        silent_s = 0.0 if events else silent_s + LOOK_EVERY_S
        if silent_s >= SILENCE_S:
            silent_s = 0.0
            yield b": nothing new\n\n"


def _behind(job_store: JobStore, id: str, last: str | None) -> tuple[list[JobEvent], bool]:
    """The next events, and whether the job had ended before they were read: its last event is among them then."""
    ended = job_store.job(id).finished
    return job_store.events(id, last, _AT_ONCE, oldest_first=True), ended


def _written(event: JobEvent) -> bytes:
    """``id``, ``event`` (its type) and ``data``, one line of JSON."""
    head = f"id: {event.id}\nevent: {event.kind}\ndata: ".encode()
    return head + orjson.dumps(event_body(event)) + b"\n\n"
