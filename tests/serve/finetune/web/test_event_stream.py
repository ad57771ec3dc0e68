"""How many streams of events may be open at once."""

from pathlib import Path
from typing import Any

import anyio
import pytest
from halfeven.models.errors import Overloaded
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest
from halfeven.serve.finetune.web.event_stream import OpenStreams, streamed


def test_a_stream_counts_while_it_is_read_and_one_too_many_is_refused(tmp_path: Path) -> None:
    job_store = JobStore(tmp_path / "halfeven.db")
    job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
    id = job_store.create_job(JobRequest("net", "net", 1, "file-1", {}, 3))[0].id
    streams = OpenStreams(2)

    async def opened() -> Any:
        return (await streamed(job_store, id, None, lambda: True, streams)).body_iterator  # type: ignore[attr-defined]

    async def ask() -> None:
        never_read, first, second = await opened(), await opened(), await opened()
        for stream in (first, second):
            assert b"queued" in await anext(stream)
        assert streams.count == 2
        with pytest.raises(Overloaded, match="2 streams of events are open"):
            await opened()
        await first.aclose()
        assert [b"queued" in part async for part in second] == [] and streams.count == 0
        await opened()
        await never_read.aclose()

    anyio.run(ask)
    job_store.close()
