"""The rows of a long batch on a CPU, an even share of them for each core, each computed by itself.

OpenMP gives every core the same share of every operation and then waits for the last one: where another program takes
one core for a moment, all cores wait. Here no core waits for another while there is a next batch (docs/batching.md).
Smaller shares, the next one for the core that is ready first, were slower: a row costs more where few are computed at a
time, and the system shares the cores among the threads fairly.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..arrays import to_numpy

# The seconds on one core. An image model with 1.2 ms a row lost a tenth and more under load: short batches lose more by
# the moments in which the event loop has one of the cores.
LONG_ROW_SECONDS = 4e-3
FEWEST_SHARED = 8  # rows of a batch
_LEAST = 2  # rows of a share: a product with a single row reads its weights for that row alone

_under_way: set[Future[Sequence[Tensor]]] = set()


def wait_for_all_shares() -> None:
    """Wait until no engine computes shares: MKL has one number of threads for the process, and shares need one each."""
    if _under_way:
        wait(list(_under_way))


@dataclass(slots=True, eq=False)
class Shared:
    """One batch, its shares computed or on their way."""

    _shares: Sequence[Future[Sequence[Tensor]]]

    def wait(self) -> list[np.ndarray]:
        """The outputs. An error of a share is raised once no share computes any more."""
        wait(self._shares)
        answers = zip(*(share.result() for share in self._shares), strict=True)
        with torch.inference_mode():
            return [to_numpy(torch.cat(shares)) for shares in answers]


class RowShares:
    """``program`` run on ``cores`` threads of its own, with one of OpenMP's each.

    ``program`` must not hold Python's lock while it runs, and its rows must not depend on each other. While the last
    share of a batch is computed the other cores may have begun the next batch.
    """

    def __init__(self, program: Callable[..., Sequence[Tensor]], cores: int) -> None:
        self._program = program
        self._cores = cores
        self._pool = ThreadPoolExecutor(cores, "halfeven-rows")

    def launch(self, *inputs: Tensor) -> Shared:
        """Begin one batch and return at once."""
        sizes = shares_of(len(inputs[0]), self._cores)
        parts = zip(*(tensor.split(sizes) for tensor in inputs), strict=True)
        shares = [self._pool.submit(self._computed, *part) for part in parts]
        _under_way.update(shares)
        for share in shares:
            share.add_done_callback(_under_way.discard)
        return Shared(shares)

    def _computed(self, *inputs: Tensor) -> Sequence[Tensor]:
        with torch.inference_mode():
            # OpenMP's number of threads belongs to this thread, MKL's to the process: another engine may have set it.
            torch.set_num_threads(1)
            return self._program(*inputs)

    def close(self) -> None:
        self._pool.shutdown()


def shares_of(rows: int, cores: int) -> list[int]:
    """Sizes of the shares, equal for equal numbers of rows, so that the bits are too. Few rows take fewer cores."""
    count = max(1, min(cores, rows // _LEAST))
    least, over = divmod(rows, count)
    return [least + 1] * over + [least] * (count - over)
