"""OpenMP keeps threads for each thread that computed with it, and how they wait depends on how many there are in all.

While there are more of them than cores, a thread that waits for the next operation sleeps at once, and waking it costs
more than a small operation: with the threads of two callers on two cores a batch of one row took 1.5 to 2.8 times as
long (GNU's libgomp, "GOMP_SPINCOUNT" in its manual).
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft (OpenMP 5.0, 3.2.44): threads end, settings stay


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread; its next operation that needs some starts them again,
    in about 0.1 ms. Nothing happens where torch computes without OpenMP."""
    _pause()(_SOFT)


@functools.cache
def _pause() -> Callable[[int], object]:
    """``omp_pause_resource_all`` of the library that torch computes with."""
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(path)).omp_pause_resource_all
    except (OSError, AttributeError):
        return lambda kind: None
