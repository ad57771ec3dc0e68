"""One batch on one version: run it, hold the outputs against the spec, give each request its rows.

A batch that fails is run again in halves, and the halves in halves, until only the guilty requests fail:
log₂(n) rounds for one poisonous request among n.
"""

import logging
from collections.abc import Callable

import numpy as np

from ...models.errors import EngineFailed
from ...models.spec import ModelSpec
from ..duty import Answer, OnDuty
from .request_queue import Request
from .tally import Tally

logger = logging.getLogger("halfeven.batcher")
Outcome = tuple[Request, Answer | EngineFailed]


class Execution:
    """Everything that one batch binds: exactly one version, its counters, the clock (nanoseconds)."""

    def __init__(self, spec: ModelSpec, duty: OnDuty, tally: Tally, clock: Callable[[], int]) -> None:
        self.spec = spec
        self.duty = duty
        self.tally = tally
        self.clock = clock

    def outcomes(self, batch: list[Request]) -> list[Outcome]:
        """Each request of the batch once, with its answer or its own failure. Raises nothing of the engine's.

        The error of a failed run is gone before the next: its traceback would keep the batch's memory.
        """
        result = self._run(batch)
        if isinstance(result, list):
            return result
        if len(batch) > 1:
            middle = len(batch) // 2
            return self.outcomes(batch[:middle]) + self.outcomes(batch[middle:])
        self.tally.failed(self.clock() - batch[0].since_ns)
        return [(batch[0], EngineFailed(self._describe(batch[0], result)))]

    def _run(self, batch: list[Request]) -> list[Outcome] | str:
        """The answers of one run, or what went wrong with it."""
        duty, rows = self.duty, sum([request.rows for request in batch])
        began_ns = self.clock()
        try:
            outputs = duty.engine.run(list(zip(*[request.arrays for request in batch], strict=True)))
            compute_ns = self.clock() - began_ns
            self._check(outputs, rows)
            shares = _split(outputs, batch)
        except BaseException as error:  # SystemExit from a model's own code is a failed run as well
            logger.warning(
                "a batch of %d requests to '%s' version %s failed", len(batch), self.spec.name, duty.version,
                exc_info=len(batch) == 1,  # the halves of a larger batch will tell
            )  # fmt: skip
            return f"{type(error).__name__}: {error}"
        waits_ns = [began_ns - request.since_ns for request in batch]
        self.tally.executed(waits_ns, rows, compute_ns)
        return [
            (request, Answer(share, duty, wait_ns, compute_ns, rows))
            for request, share, wait_ns in zip(batch, shares, waits_ns, strict=True)
        ]

    def _check(self, outputs: list[np.ndarray], rows: int) -> None:
        wanted = self.spec.outputs
        if len(outputs) != len(wanted):
            raise ValueError(f"the engine returned {len(outputs)} outputs, expected {len(wanted)}")
        if not self.spec.batched:
            return
        for spec, output in zip(wanted, outputs, strict=True):
            if output.ndim == 0 or output.shape[0] != rows:
                raise ValueError(
                    f"output '{spec.name}' has shape {list(output.shape)} for a batch of {rows} rows; "
                    f"expected {rows} as its first dimension"
                )

    def _describe(self, request: Request, fault: str) -> str:
        shapes = ", ".join(str(list(array.shape)) for array in request.arrays)
        return (
            f"version {self.duty.version} of model '{self.spec.name}' ({self.duty.precision}) failed on this "
            f"request, which was run alone (input shapes {shapes}): {fault}. The rest of its batch was not "
            "affected; try other values, and see the server's log for the traceback"
        )


def _split(outputs: list[np.ndarray], batch: list[Request]) -> list[list[np.ndarray]]:
    """Each request's rows of every output, as views."""
    if len(batch) == 1:
        return [outputs]
    shares, start = [], 0
    for request in batch:
        stop = start + request.rows
        shares.append([output[start:stop] for output in outputs])
        start = stop
    return shares
