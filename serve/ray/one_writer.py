"""The store's one writer among many replicas: a deployment with one replica, and what a replica sees of it."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ...models.errors import BadSetting, HalfevenError, NotReady
from ...models.store.store import Store
from ..server import alone_with
from ..versions.store_copy import StoreCopy
from ..versions.store_writer import Numbers, Role, StoreWriter
from .options import Options

logger = logging.getLogger("halfeven.versions")
WRITER = "StoreWriter"  # the name of its deployment
_TRIES = 4  # a writer whose node was lost is started on another one
_ANSWER_S = 30.0
_LOCK_S = 60  # seconds for a writer before this one to end
Outcome = tuple[Any, HalfevenError | OSError | None]


class OneWriter:
    """The deployment's class. It holds the store's lock, as `halfeven serve` does: another server there is refused."""

    def __init__(self, options: Options) -> None:
        self._source = options.store
        fs, path = fsspec.core.url_to_fs(options.store)
        self._copy: StoreCopy | None = None
        if isinstance(fs, LocalFileSystem):
            store = Store(Path(path))
            self._lock = _lock_of(store)
        else:  # an object store has no locks: Ray Serve runs one replica of this deployment
            self._copy = StoreCopy(options.store, options.folder())
            store = self._copy.store
        self._writer = StoreWriter(store)

    def source(self) -> str:
        """The store, as the options name it."""
        return self._source

    def write(self, verb: str, name: str, given: tuple[Any, ...]) -> Outcome:
        """Call a method of `StoreWriter`. Errors are part of the outcome: Ray would wrap them in its own."""
        deed = partial(getattr(self._writer, verb), name, *given)
        try:
            return (deed() if self._copy is None else self._copy.change(name, deed)), None
        except (HalfevenError, OSError) as error:
            return None, error


def _lock_of(store: Store) -> IO[bytes]:
    """The store's lock; a writer before this one may still be ending."""
    for _ in range(_LOCK_S):
        try:
            return alone_with(store)
        except BadSetting:
            time.sleep(1)
    return alone_with(store)


class RemoteWriter(StoreWriter):
    """A `StoreWriter` that asks the one writer. ``after`` is called when the store was changed.

    Call it on no event loop. Every method raises NotReady too where the writer does not answer.
    """

    def __init__(self, handle: DeploymentHandle, after: Callable[[], None]) -> None:
        self._handle, self._after = handle, after

    def source(self) -> str:
        """The store that the writer writes to: a path or a URL of fsspec."""
        try:
            return self._handle.source.remote().result(timeout_s=_ANSWER_S)
        except (RayError, TimeoutError) as lost:
            raise NotReady(f"the store's writer does not answer ({type(lost).__name__}); ask later") from lost

    def promote(self, name: str, number: int) -> None:
        self._ask("promote", name, number)

    def promote_over(self, name: str, current: int | None, number: int, by: str) -> None:
        self._ask("promote_over", name, current, number, by)

    def roll_back(self, name: str) -> int:
        return self._ask("roll_back", name, tries=1)  # one that is sent twice may go back twice

    def put_back(self, name: str, bad: int, good: int) -> None:
        self._ask("put_back", name, bad, good)

    def order(self, name: str, role: Role, number: int | None, percent: float) -> None:
        self._ask("order", name, role, number, percent)

    def end_share(self, name: str, role: Role, number: int) -> None:
        self._ask("end_share", name, role, number)

    def note_drift(self, name: str, number: int, device: str, reason: str) -> None:
        self._ask("note_drift", name, number, device, reason)

    def keep_input(self, name: str, arrays: Mapping[str, np.ndarray], most: int) -> None:
        """The input is sent to the one writer, and its answer is not waited for."""
        self._handle.write.remote("keep_input", name, (dict(arrays), most))

    def record(self, name: str, kind: str, message: str, numbers: Numbers | None = None) -> None:
        """The event is sent to the one writer, and its answer is not waited for: a writer that is away delays no
        decision."""
        self._handle.write.remote("record", name, (kind, message, numbers))

    def _ask(self, verb: str, name: str, *given: Any, tries: int = _TRIES) -> Any:
        result, error = self._outcome(verb, name, given, tries)
        if error is not None:
            raise error
        try:
            self._after()
        except (
            HalfevenError
        ) as late:  # the order has been carried out: reported as failed, it would be sent again
            logger.warning("the store's copy does not follow %s yet: %s", verb, late)
        return result

    def _outcome(self, verb: str, name: str, given: tuple[Any, ...], tries: int) -> Outcome:
        try:
            return self._handle.write.remote(verb, name, given).result(timeout_s=_ANSWER_S)
        except (RayError, RayServeException, TimeoutError) as lost:
            logger.warning("the store's writer did not answer to %s: %s", verb, lost)
            if tries > 1:
                return self._outcome(verb, name, given, tries - 1)
            raise NotReady(
                f"the store's writer does not answer ({type(lost).__name__}); the order may have been carried out: "
                f"GET /v1/models/{name} says so; if it was not, send it again"
            ) from lost
