"""``halfeven.Client``: a server's predictions, fine-tuning jobs and versions, with arrays of numpy or torch.
``halfeven.AsyncClient``: the same methods, awaited by a program that has an event loop."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from ...models.errors import BadInput, EngineFailed, Overloaded, TimedOut
from ..access.client_key import key_headers
from ..access.direct_requests import ask, model_path
from ..cli.console import notify
from ..finetune.client.job_command import JobBar, Watch, facts_of, fine_tune
from ..finetune.client.remote import Remote
from ..http.codecs.infer_client import HEADER_LENGTH, read_outputs, write_binary
from ..http.codecs.json_numbers import parse
from .arrays_given import Given, as_numpy, by_name, rows_in

T = TypeVar("T")


class Client:
    """One server by its URL. ``key``: by default that of HALFEVEN_API_KEY. A prediction whose answer was lost on the
    way is asked once more; one that the server is too busy for is asked again up to ``retries`` times, when it says.

    Every method raises BadInput with the server's words where it refuses, Overloaded where it is to be asked later,
    NotReady where no server answers.
    """

    def __init__(
        self, url: str, *, key: str | None = None, timeout_s: float = 60.0, retries: int = 2
    ) -> None:
        self.url, self._key, self._timeout_s = url.rstrip("/"), key, timeout_s
        self._retries = retries
        self._remote = Remote(self.url, key=key)
        self._signatures = dict[str, tuple[list[str], list[str]]]()

    def infer(self, name: str, inputs: Mapping[str, Given]) -> dict[str, np.ndarray]:
        """The outputs by name. ``name``: NAME, or NAME@VERSION."""
        body, headers = write_binary({key: as_numpy(value, key) for key, value in inputs.items()})
        said, answer = self._ask(f"{model_path(name)}/infer", body, headers)
        return read_outputs(answer, said.get(HEADER_LENGTH.lower()))

    def predict(self, name: str, *inputs: Given, **named: Given) -> Any:
        """The outputs by name, of a model with one output its array alone. The inputs are given in order or by name."""
        names, _ = self._signature(name)
        answers = self.infer(name, by_name(names, inputs, named, f"'{name}'"))
        return next(iter(answers.values())) if len(answers) == 1 else answers

    def finetune(
        self,
        name: str,
        data: tuple[Given, Given] | Mapping[str, Given] | str | Path,
        *,
        epochs: int | None = None,
        validation: str | Path | None = None,
        seed: int | None = None,
        suffix: str | None = None,
        progress: bool = False,
        **hyperparameters: Any,
    ) -> "Job":
        """Send the rows and begin a job. ``data``: (input, target) of a model with one of each, arrays by name
        (``target:OUTPUT`` for the targets), or a file or folder as ``halfeven finetune --data`` takes it."""
        asked = {"n_epochs": epochs, **hyperparameters}
        console = Console(stderr=True, highlight=False, emoji=False, quiet=not progress)
        with tempfile.TemporaryDirectory(prefix="halfeven-rows-") as folder:
            file = Path(data) if isinstance(data, str | Path) else self._rows(name, data, Path(folder))
            facts = fine_tune(
                self._remote, name, file, validation=Path(validation) if validation else None, suffix=suffix,
                seed=seed, hyperparameters=asked, follow=False, console=console,
                notify=notify if progress else _quiet,
            )  # fmt: skip
        return Job(self._remote, facts["job"], console)

    def rollback(self, name: str) -> dict[str, Any]:
        """Make the version before the active one active again; gives its facts."""
        return self._remote.rollback(name)

    def _rows(self, name: str, data: tuple[Given, Given] | Mapping[str, Given], folder: Path) -> Path:
        file = folder / "rows.safetensors"
        if isinstance(data, Mapping):
            rows_in(file, data, {})
            return file
        inputs, outputs = self._signature(name)
        if len(data) != 2 or len(inputs) != 1 or len(outputs) != 1:
            raise BadInput(
                f"data: '{name}' has the inputs {inputs} and the outputs {outputs}; expected (input, target) where it "
                "has one of each, else {'INPUT': array, …, 'target:OUTPUT': array, …}"
            )
        rows_in(file, {inputs[0]: data[0]}, {outputs[0]: data[1]})
        return file

    def _signature(self, name: str) -> tuple[list[str], list[str]]:
        if name not in self._signatures:
            try:
                said = parse(self._ask(model_path(name), None, {})[1])
                found = [[tensor["name"] for tensor in said[side]] for side in ("inputs", "outputs")]
            except (KeyError, TypeError) as error:
                raise EngineFailed(
                    f"{self.url} does not describe '{name}' as halfeven does: {error!r}"
                ) from None
            self._signatures[name] = found[0], found[1]
        return self._signatures[name]

    def _ask(
        self, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[Mapping[str, str], bytes]:
        more = {**key_headers(self._key), **headers}
        for left in reversed(range(self._retries + 1)):
            try:
                return ask(f"{self.url}{path}", body, timeout_s=self._timeout_s, headers=more)
            except Overloaded as error:
                if not left or error.retry_after_s > self._timeout_s:
                    raise
                time.sleep(error.retry_after_s)
        raise AssertionError("retries is at least 0")


class Job:
    """A fine-tuning job at a server."""

    def __init__(self, remote: Remote, id: str, console: Console) -> None:
        self._remote, self.id, self._console = remote, id, console

    @property
    def status(self) -> str:
        """``queued``, ``running``, ``succeeded``, ``failed``, ``cancelled``, … as OpenAI's API has it."""
        return self._remote.job(self.id)["status"]

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The facts of the job at its end, as ``halfeven finetune --json`` prints them: ``status``, ``promotion``,
        ``gate``, ``error``, … Ctrl-C cancels the job. Raises TimedOut where it runs longer."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def pause(seconds: float) -> None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimedOut(
                    f"job {self.id} did not end within {timeout_s:g} s; it runs on, and cancel() ends it"
                )
            time.sleep(seconds)

        with JobBar(self._console) as bar:
            watch = Watch(self._remote, bar, _quiet, time.monotonic, pause)
            (ended,) = watch.until_they_end([self._remote.job(self.id)])
            return facts_of(ended, self._remote.url)

    def cancel(self) -> None:
        """Ask the server to end the job after its current step."""
        self._remote.cancel(self.id)


def _quiet(_: str) -> None:
    """Says nothing."""


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
