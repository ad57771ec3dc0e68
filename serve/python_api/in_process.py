"""A version that answers in this process: made ready as by a server, then asked through its batcher, without HTTP."""

import asyncio
import threading
import weakref
from collections.abc import Mapping

import numpy as np

from ...models.batch_axis import array_batch_back, array_batch_first
from ...models.store import Version
from ..batching.batcher import Batcher
from ..batching.device import DeviceThread
from ..batching.interface import Answer
from ..server import place_of
from ..settings import read_settings
from ..versions.loading.ready import make_ready
from .arrays_given import Given, as_numpy

_PATIENCE_S = 30.0  # for a batch that is computed while the model is closed


class InProcess:
    """A version that is loaded when this object is made, on the device of ``HALFEVEN_DEVICE`` (auto by default).

    Any thread may call it.
    """

    def __init__(self, version: Version) -> None:
        self._spec = version.spec().on_the_wire()
        place = place_of(read_settings(host="127.0.0.1"))  # nothing listens, so no keys are asked for
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
        self.close = weakref.finalize(self, _end, self._loop, place.thread)

    def answer(self, given: Mapping[str, Given]) -> dict[str, np.ndarray]:
        """The outputs by name. Raises BadRequest as the server refuses, EngineFailed where the model fails."""
        spec = self._spec
        arrays = {name: as_numpy(value) for name, value in given.items()}
        axes = {tensor.name: tensor.batch_axis for tensor in spec.inputs}
        arrays = {name: array_batch_first(array, axes.get(name, 0)) for name, array in arrays.items()}
        rows = spec.check_inputs(arrays)
        ordered = [np.ascontiguousarray(arrays[tensor.name]) for tensor in spec.inputs]
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
