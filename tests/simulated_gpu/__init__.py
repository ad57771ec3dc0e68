"""A CUDA device made of the CPU's memory, late on purpose: ``SimulatedGpu`` under the project's own engines.

Torch's CUDA functions are replaced while it is entered. An operation on the device is put into the queue of the current
stream, and its results hold rubbish (0xFF, NaN in every floating type) until the queue gets there. Queues advance
in an order drawn by chance, bound by events alone. What it shows is order, lifetime and blocking; the values of real
kernels, their times and the faults of a driver it cannot show.
"""

from .gpu import SimulatedGpu

__all__ = ["SimulatedGpu"]
