"""The number of threads that plan and judge: decided by the model's size and the cores, never by what else runs.

Another number of threads adds a product or a sum up in another order, and another last bit may choose another plan. One
thread also suffers least from other programs: two that wait for each other at every operation were ten times slower
beside two busy processes. More threads than cores wait so for each other always: with four threads on two cores MKL's
product of 3152×3072 with 3072×768 took 70 times as long as with two.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ...models.machine.usable_cores import threads_of_libraries, usable_cores

LARGE_ROW = 1 << 28  # operations: a small ResNet of the zoo has 2e7 a row, ResNet-50 4e9
FEW, MANY = 1, 4  # of many no more than there are cores
_fixed: ContextVar[int | None] = ContextVar("threads that plan and judge", default=None)


@contextmanager
def fixed_threads(row_operations: int) -> Iterator[None]:
    """Fix the number of threads while a model is planned and judged, by the operations of one row: of ONNX sessions
    that are made meanwhile (`threads_now`), and of torch where this process has imported it."""
    count = min(MANY, usable_cores()) if row_operations >= LARGE_ROW else FEW
    token, torch = _fixed.set(count), sys.modules.get("torch")
    before = torch.get_num_threads() if torch else count
    if torch:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        _fixed.reset(token)
        if torch:
            torch.set_num_threads(before)


def threads_now() -> int:
    """The number of threads of an ONNX session that is made now."""
    return _fixed.get() or threads_of_libraries()
