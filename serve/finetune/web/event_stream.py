"""The events of a job as they happen: server-sent events (WHATWG HTML §9.2), which go on from ``Last-Event-ID``."""

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from ....models.errors import Overloaded
from ..jobs.records.job_store import JobStore
from ..jobs.records.job_types import Event
from .openai_shapes import event_body

LOOK_EVERY_S = 0.25
SILENCE_S = 15.0  # then a comment is sent: whatever stands between sees that the connection is in use
MOST_STREAMS = 100  # each looks into the job store four times a second
_RETRY_AFTER_S = 10.0
_AT_ONCE = 500  # events
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class OpenStreams:
    """Counts the streams that are open. It has no lock: only the event loop's thread may use it."""

    def __init__(self, most: int = MOST_STREAMS) -> None:
        self.most, self.count = most, 0

    def check(self) -> None:
        """Raises Overloaded where there are as many as there may be."""
        if self.count >= self.most:
            raise Overloaded(
                f"{self.most} streams of events are open; ask without `stream` (`order=asc` with `after`), or again "
                "when some have ended",
                _RETRY_AFTER_S,
            )


async def streamed(
    job_store: JobStore, id: str, last: str | None, leaving: Callable[[], bool], streams: OpenStreams
) -> Response:
    """The events behind the event ``last`` (None: all), and each further one until the job has ended.

    The stream ends with the job, or where the server is ``leaving``; a client that comes back then names the last event
    that it has. Where nothing can come any more the answer is 204, at which browsers stop coming back. Raises
    UnknownName for the job, and for a ``last`` that is no event of it, Overloaded.
    """
    streams.check()
    events, ended = await run_in_threadpool(_behind, job_store, id, last)
    if ended and not events and last is not None:
        return Response(status_code=204)
    stream = _counted(_stream(job_store, id, last, leaving), streams)
    return StreamingResponse(stream, headers=_HEADERS, media_type="text/event-stream")


async def _counted(stream: AsyncIterator[bytes], streams: OpenStreams) -> AsyncIterator[bytes]:
    """The stream, counted from its first bytes on: one that is never begun is not counted for ever."""
    streams.count += 1
    try:
        async for part in stream:
            yield part
    finally:
        streams.count -= 1


async def _stream(
    job_store: JobStore, id: str, last: str | None, leaving: Callable[[], bool]
) -> AsyncIterator[bytes]:
    silent_s = 0.0
    while True:
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


def _behind(job_store: JobStore, id: str, last: str | None) -> tuple[list[Event], bool]:
    """The next events, and whether the job had ended before they were read: its last event is among them then."""
    ended = job_store.job(id).finished
    return job_store.events(id, last, _AT_ONCE, oldest_first=True), ended


def _written(event: Event) -> bytes:
    """``id``, ``event`` (its type) and ``data``, one line of JSON."""
    head = f"id: {event.id}\nevent: {event.kind}\ndata: ".encode()
    return head + orjson.dumps(event_body(event)) + b"\n\n"
