"""A read in a thread leaves nothing behind where it fails."""

import asyncio
import gc
import weakref

import pytest
from halfeven.serve.http.inference import WorkerThreads


class Large:
    """A stand-in for a body that is being unpacked."""


def test_what_a_refused_request_held_is_free_when_it_is_refused() -> None:
    """The collector is not needed: a traceback that refers to itself would keep a body until that runs."""
    held: list[weakref.ref[Large]] = []

    def unpack() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise ValueError("too large")

    async def run() -> None:
        worker_threads = WorkerThreads(threads=1)
        for _ in range(3):
            with pytest.raises(ValueError, match="too large") as caught:
                await worker_threads.run(unpack)
            del caught
        await asyncio.sleep(0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert [one() for one in held[:2]] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 2), (16, 8)])
def test_there_are_half_as_many_threads_as_cores_and_never_more_than_cores(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.serve.http.inference.usable_cores", lambda: cores)
    assert WorkerThreads()._threads == threads
