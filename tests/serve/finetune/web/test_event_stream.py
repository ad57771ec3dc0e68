"""The number of streams of events that may be open at once, however many are asked for at the same moment."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from halfeven.models.errors import Overloaded
from halfeven.serve.access.access_control import Permit
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest
from halfeven.serve.finetune.web.event_stream import open_streams, streamed


@pytest.fixture
def job_store(tmp_path: Path) -> Iterator[JobStore]:
    job_store = JobStore(tmp_path / "halfeven.db")
    job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
    job_store.create_job(JobRequest("net", "net", 1, "file-1", {}, 3))
    yield job_store
    job_store.close()


async def sent(response: Any) -> bytes:
    """All bytes of an answer."""
    parts: list[bytes] = []

    async def receive() -> Any:
        await anyio.sleep_forever()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    return b"".join(parts)


def test_of_many_streams_that_are_asked_for_at_once_no_more_are_opened_than_may_be(
    job_store: JobStore,
) -> None:
    """A place is taken before anything is awaited: else all of them would find the same places free."""
    streams, opened, refused = open_streams(3), list[Any](), list[Overloaded]()

    async def one() -> None:
        try:
            opened.append(await streamed(job_store, job_store.jobs()[0].id, None, lambda: True, streams))
        except Overloaded as error:
            refused.append(error)

    async def ask() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(one)
        assert (len(opened), len(refused), streams.count) == (3, 37, 3)
        assert "3 streams of events are open" in str(refused[0])

    anyio.run(ask)


def test_a_place_is_given_back_when_the_stream_ends_fails_or_is_never_begun(job_store: JobStore) -> None:
    streams, id = open_streams(2), job_store.jobs()[0].id

    async def ask() -> None:
        never_begun = await streamed(job_store, id, None, lambda: True, streams)
        answer = await streamed(job_store, id, None, lambda: True, streams)
        assert streams.count == 2
        assert b"queued" in await sent(answer) and streams.count == 1
        with pytest.raises(Exception, match="no fine-tuning job"):
            await streamed(job_store, "ftjob-none", None, lambda: True, streams)
        assert streams.count == 1
        del never_begun
        assert streams.count == 0
        job_store.request_cancel(id)
        last = job_store.events(id)[0].id
        assert (await streamed(job_store, id, last, lambda: True, streams)).status_code == 204
        assert streams.count == 0

    anyio.run(ask)


def test_a_stream_ends_when_its_key_does_not_stand_any_more(job_store: JobStore) -> None:
    asked = list[int]()

    class Revoked(Permit):
        def stands(self) -> bool:
            asked.append(1)
            return len(asked) < 3

    async def ask() -> None:
        id = job_store.jobs()[0].id
        with anyio.fail_after(20):
            assert b"queued" in await sent(
                await streamed(job_store, id, None, lambda: False, open_streams(), Revoked(None, known=True))
            )

    anyio.run(ask)
