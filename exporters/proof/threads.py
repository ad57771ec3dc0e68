"""The number of threads that plan and judge: decided by the model's size, never by the machine.

Another number of threads adds a product or a sum up in another order, and another last bit may choose another plan. One
thread also suffers least from other programs: two that wait for each other at every operation were ten times slower
beside two busy processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LARGE_ROW = 1 << 28  # operations: a small ResNet of the zoo has 2e7 a row, ResNet-50 4e9
FEW, MANY = 1, 4


@contextmanager
def fixed_threads(row_operations: int) -> Iterator[None]:
    """Set torch's number of threads while a model is planned and judged, by the operations of one row.

    ONNX sessions that are made meanwhile get the same number: `torch.get_num_threads`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(MANY if row_operations >= LARGE_ROW else FEW)
    try:
        yield
    finally:
        torch.set_num_threads(before)
