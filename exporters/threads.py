"""How many threads plan and judge: settled by the model's size, never by the machine.

Where a product or a sum is divided among other numbers of threads it is added up in another order, and another last
bit may choose another plan. One thread is also what suffers least from other work: two that wait for each other at
every operation were ten times slower beside two busy processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LARGE_ROW = 1 << 28  # operations: a small ResNet of the zoo has 2e7 a row, ResNet-50 4e9
FEW, MANY = 1, 4


@contextmanager
def fixed_threads(row_operations: int) -> Iterator[None]:
    """Torch's threads while a model is planned and judged whose single row takes so many operations.

    What makes an ONNX session meanwhile gives it as many: `torch.get_num_threads`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(MANY if row_operations >= LARGE_ROW else FEW)
    try:
        yield
    finally:
        torch.set_num_threads(before)
