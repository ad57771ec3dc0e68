"""A simulated device, and the thread that owns it, as versions are loaded there."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from random import Random

from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.place import Place

from tests.patience import PATIENCE_S
from tests.simulated_gpu import SimulatedGpu


@contextmanager
def simulated_place(without_half: Collection[str] = ()) -> Iterator[tuple[SimulatedGpu, Place]]:
    """``without_half``: the operations for which the device has no half kernel."""
    thread = DeviceThread("cuda:0")
    thread.start()
    try:
        with SimulatedGpu(Random(0)) as gpu:
            gpu.operations.without_half = set(without_half)
            thread.call(gpu.operations.__enter__).result(PATIENCE_S)
            yield gpu, Place(gpu.device, thread)
    finally:
        thread.stop(30)
