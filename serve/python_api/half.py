"""A converted model as an object of Python: its verdict, its report, and its answers in this process."""

import asyncio
import html
import os
import shutil
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...exporters.conversion.convert import Conversion, check_signature, readable_versions
from ...exporters.exported.folder import export
from ...exporters.graph.actions import Kept
from ...exporters.half_files.half_file import Verdict, verdict_of
from ...exporters.report.page import table
from ...exporters.report.stored_page import stored_page
from ...exporters.report.version_facts import facts_of
from ...models.engines.cpu.openmp import end_openmp_threads
from ...models.errors import NotReady, ParityRefused
from ...models.spec.batch_axis import array_batch_back, array_batch_first
from ...models.store.store import LIVE, OPERATOR, Store, Version
from ...models.store.version_copy import copied_version
from ..batching.batcher import Batcher
from ..batching.device import DeviceThread
from ..batching.interface import Answer
from ..server import place_of
from ..settings import read_settings
from ..versions.loading.ready import make_ready
from ..versions.versions_in_store import store_at
from .arrays_given import Given, as_numpy, by_name, is_tensor

_PATIENCE_S = 30.0  # for a batch that is computed while the model is closed


class Half:
    """A converted version. ``owned``: its store is a temporary one, which is removed with this object.

    ``half(x)`` loads the model at the first call, as a server does, and gives what a server on this device answers.
    """

    def __init__(self, version: Version, store: Store, owned: bool = False) -> None:
        self.version, self.store = version, store
        self._running: InProcess | None = None
        self._loading = threading.Lock()
        self._of_parent = False
        self._removal = (
            weakref.finalize(self, shutil.rmtree, store.root, ignore_errors=True) if owned else None
        )
        _HALVES.add(self)

    @property
    def name(self) -> str:
        return self.version.name

    @property
    def digest(self) -> str:
        """The SHA-256 over the digests of all files: the same in every store."""
        return self.version.digest

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that ``halfeven convert --json`` prints."""
        return facts_of(self.version)

    @property
    def verdict(self) -> Verdict:
        """``equal``: a half is proven; ``fp32``: nothing is half, ``reason`` says why; ``refused``: no half passed."""
        return verdict_of(self.version)

    @property
    def reason(self) -> str:
        return self.version.manifest["reason"]

    @property
    def max_error_u(self) -> float | None:
        """The largest error of any form, in u of the half's dtype; None where nothing was judged."""
        errors = (form.get("max_error_u") for form in self.version.manifest["forms"].values())
        return max((error for error in errors if error is not None), default=None)

    @property
    def kept(self) -> list[Kept]:
        """The nodes that the policy would run in half and that stay in FP32, with reasons; of the first form."""
        forms = self.version.manifest["forms"].values()
        return [Kept(**one) for one in next((form["kept"] for form in forms if form.get("kept")), ())]

    def __call__(self, *inputs: Given, **named: Given) -> Any:
        """The answer to one batch: the array of the only output, or the arrays of all outputs by name; torch's where an
        input is torch's. Any thread may call it. Raises BadRequest for inputs that do not fit, ParityRefused for a
        refused half, NotReady in a process that was forked after the first call."""
        if self.verdict == "refused":
            raise ParityRefused(f"{self.version} was refused and is not run: {self.reason}")
        names = [tensor.name for tensor in self.version.spec().inputs]
        given = by_name(names, inputs, named, f"'{self.name}'")
        if self._of_parent:
            raise NotReady(
                f"{self.version} was loaded before this process was forked, and only the parent can call it: close the "
                'half before the fork, or start processes by the method "spawn"'
            )
        with self._loading:
            running = self._running = self._running or InProcess(self.version)
            running.begin()
        try:
            answers = running.answer(given)
        finally:
            running.finish()
        if any(map(is_tensor, given.values())):
            from ...models.engines.arrays import to_torch

            answers = {name: to_torch(array) for name, array in answers.items()}
        return next(iter(answers.values())) if len(answers) == 1 else answers

    def save(self, store: str | os.PathLike[str]) -> "Half":
        """Publish the version in a store, under its next number, and make it active there unless it is refused.

        Raises StoreUnusable, and BadInput where the newest version there that is not damaged has other inputs or
        outputs.
        """
        target = store_at(Path(store), "the version")
        check_signature(self.version.spec(), next(readable_versions(target, self.name), None))
        saved = copied_version(self.version, target)
        if saved.status == LIVE:
            target.promote_published(saved, OPERATOR)
        return Half(saved, target)

    def export(self, out: str | os.PathLike[str], target: str = "onnxruntime") -> dict[str, Any]:
        """Write a folder for another engine (``tensorrt``, ``onnxruntime``, ``openvino``), as ``halfeven export`` does;
        gives its facts. Raises Conflict where the folder is not empty, CannotConvert where there is no half as ONNX."""
        return export(self.version, target, Path(out))

    def report(self) -> str:
        """The report as one HTML page that loads nothing."""
        return stored_page(self.version)

    def close(self) -> None:
        """Give the memory of the model back when the calls that have begun are answered; the next call loads it
        again."""
        with self._loading:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def _leave_to_parent(self) -> None:
        """Forget, in a forked process, what runs in the parent alone, and what the parent removes."""
        self._loading = threading.Lock()  # a thread of the parent may hold the other one
        if self._removal is not None:
            self._removal.detach()
        if self._running is not None:
            self._running.end.detach()
            self._of_parent, self._running = True, None

    def __str__(self) -> str:
        return table(Conversion(self.version, self.facts).shown())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        page = html.escape(self.report(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:40em;border:0" title="{self.version}"></iframe>'


_HALVES = weakref.WeakSet[Half]()


def _after_fork() -> None:
    for half in list(_HALVES):
        half._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class InProcess:
    """A version that is loaded when this object is made, on the device of ``HALFEVEN_DEVICE`` (auto by default).

    Any thread may call it, between `begin` and `finish`.
    """

    def __init__(self, version: Version) -> None:
        self._spec = version.spec().on_the_wire()
        # Nothing listens, so no keys are asked for. A server of the same program is not slowed by an idle half.
        place = place_of(read_settings(host="127.0.0.1"), at_rest=end_openmp_threads)
        place.thread.start()
        try:
            prepared = make_ready(version, place)
        except BaseException:
            place.thread.stop(_PATIENCE_S)
            raise
        self.prepared = prepared
        self._batcher = Batcher(version.spec(), place.thread, prepared)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="halfeven-calls", daemon=True).start()
        self._calls, self._ended = 0, threading.Condition()
        self.end = weakref.finalize(self, _end, self._loop, place.thread)

    def begin(self) -> None:
        """Count a call, which `close` waits for."""
        with self._ended:
            self._calls += 1

    def finish(self) -> None:
        with self._ended:
            self._calls -= 1
            self._ended.notify_all()

    def close(self) -> None:
        """Wait for the calls that have begun, for a while, and end."""
        with self._ended:
            self._ended.wait_for(lambda: not self._calls, _PATIENCE_S)
        self.end()

    def answer(self, given: Mapping[str, Given]) -> dict[str, np.ndarray]:
        """The outputs by name. Raises BadRequest as the server refuses, EngineFailed where the model fails."""
        spec = self._spec
        arrays = {name: as_numpy(value, name) for name, value in given.items()}
        axes = {tensor.name: tensor.batch_axis for tensor in spec.inputs}
        arrays = {name: array_batch_first(array, axes.get(name, 0)) for name, array in arrays.items()}
        rows = spec.check_inputs(arrays)
        ordered = [np.ascontiguousarray(arrays[tensor.name]) for tensor in spec.inputs]
        if self.prepared.setup is not None and self.prepared.setup.threads > 1:
            end_openmp_threads()  # those of the caller, who waits, would slow the half
        found = asyncio.run_coroutine_threadsafe(self._asked(ordered, rows), self._loop).result()
        return {
            tensor.name: np.array(array_batch_back(output, tensor.batch_axis), order="C")  # the caller's own
            for tensor, output in zip(spec.outputs, found.outputs, strict=True)
        }

    async def _asked(self, arrays: list[np.ndarray], rows: int) -> Answer:
        return await self._batcher.submit(arrays, rows)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, device: DeviceThread) -> None:
    device.stop(_PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
