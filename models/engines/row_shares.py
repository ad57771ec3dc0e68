"""On a CPU: the rows of a long batch, shared among the cores; whoever is done first takes the next.

OpenMP gives every core the same share of every operation and then waits for the last: what somebody else takes of one
core is lost on all. Measured on two cores with an encoder at batches of 32: beside a program that uses a quarter of
one core, 9 to 14 % more rows than with two threads in each operation, beside one that uses all of it 50 to 70 % more;
with nobody beside it, as many (docs/batching.md).
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

LONG_ROW_SECONDS = 4e-3  # on one core; where rows are shorter, shares of two cost more than they bring
FEWEST_SHARED = 8  # rows of a batch
_LEAST = 2  # rows of a share: a product with a single row reads its weights for that row alone


class RowShares:
    """``program`` run on ``cores`` threads, the caller's and others of its own, with one of OpenMP's each.

    ``program`` must not hold Python's lock while it runs, and its rows must not depend on each other.
    """

    def __init__(self, program: Callable[..., Sequence[Tensor]], cores: int) -> None:
        self._program = program
        self._cores = cores
        self._pool = ThreadPoolExecutor(cores - 1, "halfeven-rows")

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """As ``program`` answers. Raises what it raised on one of the shares, once nobody computes any more."""
        sizes = shares_of(len(inputs[0]), self._cores)
        parts = list(zip(*(tensor.split(sizes) for tensor in inputs), strict=True))
        waiting = deque(range(len(parts)))
        answers: list[Sequence[Tensor]] = [()] * len(parts)

        def work() -> None:
            with torch.inference_mode():
                # This thread's OpenMP, and MKL's for all of them: another engine may have set it.
                torch.set_num_threads(1)
                while waiting:
                    try:
                        place = waiting.popleft()
                    except IndexError:  # another took the last
                        return
                    answers[place] = self._program(*parts[place])

        others: list[Future[None]] = [self._pool.submit(work) for _ in range(self._cores - 1)]
        try:
            work()
        finally:
            waiting.clear()  # after an error nobody begins another share
            raised = [other.exception() for other in others]
        for error in raised:
            if error is not None:
                raise error
        return [torch.cat(shares) for shares in zip(*answers, strict=True)]

    def close(self) -> None:
        self._pool.shutdown()


def shares_of(rows: int, cores: int) -> list[int]:
    """Large shares first and small ones last, so that all cores end together; the same for as many rows.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987), with half of what would be each core's share.
    """
    shares: list[int] = []
    while rows:
        shares.append(min(rows, max(_LEAST, rows // (2 * cores))))
        rows -= shares[-1]
    return shares
