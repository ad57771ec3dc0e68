"""``halfeven.AsyncClient``: the methods of `Client`, awaited by a program that has an event loop."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .arrays_given import Given
from .client import Client, Job

T = TypeVar("T")


class AsyncClient:
    """A `Client` of which ``concurrency`` requests are under way at once; further ones wait for their turn.

    Each request runs in a thread of this object's own: leave it by ``async with``, or call `close`. A cancelled await
    leaves its request to the server.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 2,
        concurrency: int = 64,
    ) -> None:
        self._client = Client(url, key=key, timeout_s=timeout_s, retries=retries)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="halfeven-client")
        self.url = self._client.url

    async def infer(self, name: str, inputs: Mapping[str, Given]) -> dict[str, np.ndarray]:
        return await _in_thread(self._threads, lambda: self._client.infer(name, inputs))

    async def predict(self, name: str, *inputs: Given, **named: Given) -> Any:
        return await _in_thread(self._threads, lambda: self._client.predict(name, *inputs, **named))

    async def finetune(
        self, name: str, data: tuple[Given, Given] | Mapping[str, Given] | str | Path, **settings: Any
    ) -> "AsyncJob":
        """``settings``: as those of `Client.finetune`."""
        begin = partial(self._client.finetune, name, data, **settings)
        return AsyncJob(await _in_thread(self._threads, begin), self._threads)

    async def rollback(self, name: str) -> dict[str, Any]:
        return await _in_thread(self._threads, lambda: self._client.rollback(name))

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AsyncJob:
    """A `Job` whose methods are awaited."""

    def __init__(self, job: Job, threads: Executor) -> None:
        self.id, self._job, self._threads = job.id, job, threads

    async def status(self) -> str:
        return await _in_thread(self._threads, lambda: self._job.status)

    async def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        return await _in_thread(self._threads, lambda: self._job.wait(timeout_s))

    async def cancel(self) -> None:
        await _in_thread(self._threads, self._job.cancel)


async def _in_thread(threads: Executor, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, call)
