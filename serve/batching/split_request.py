"""A request with more rows than a batch takes is run in parts and answered as one."""

from dataclasses import dataclass

import numpy as np

from ...models.errors import BadRequest, EngineFailed, TimedOut
from .interface import Answer

Outcome = Answer | EngineFailed | TimedOut | BadRequest


class SplitRequest:
    """A request with more rows than a batch takes: it is run in ``parts`` and answered as one. On the device thread.

    The parts are queued one behind the other in their group and are run as ordinary requests. They share the caller's
    future. A version that has begun a request answers all of it: a swap waits for its last part
    (`BatchScheduler.swap`).

    ``begun``: a part has been taken for a batch. ``over``: the request is answered, has failed, or its caller has gone;
    the remaining parts are ignored, and the request has been counted.
    """

    def __init__(self, parts: int) -> None:
        self.begun = False
        self.over = False
        self._answers: list[Answer | None] = [None] * parts

    def take(self, index: int, outcome: Outcome) -> Outcome | None:
        """Take the outcome of one part; gives that of the request once: at the last answer or the first failure."""
        if self.over:
            return None
        if isinstance(outcome, Answer):
            self._answers[index] = outcome
            if any(answer is None for answer in self._answers):
                return None
            outcome = _joined([answer for answer in self._answers if answer is not None])
        self.over = True
        self._answers.clear()
        return outcome


@dataclass(slots=True, eq=False)
class Part:
    """The place of one part in its request."""

    request: SplitRequest
    index: int
    last: bool


def _joined(answers: list[Answer]) -> Outcome:
    """One answer: outputs joined along the batch, the longest wait, the sum of the compute times."""
    prepared = answers[0].prepared
    if any(answer.prepared is not prepared for answer in answers):
        versions = sorted({answer.prepared.version for answer in answers})
        return EngineFailed(
            f"parts of one request were answered by versions {versions}; a mistake of ours, please report it"
        )
    try:
        outputs = [np.concatenate(shares) for shares in zip(*[a.outputs for a in answers], strict=True)]
    except (MemoryError, ValueError) as error:  # parts whose free dimensions differ, for one
        return EngineFailed(
            f"the answers to the {len(answers)} parts of a large request cannot be joined: {error}; "
            "send it as several requests"
        )
    return Answer(
        outputs,
        prepared,
        queue_ns=max(answer.queue_ns for answer in answers),
        compute_ns=sum(answer.compute_ns for answer in answers),
        batch_rows=max(answer.batch_rows for answer in answers),
        assemble_ns=sum(answer.assemble_ns for answer in answers),
        rescued=sum(answer.rescued for answer in answers),
    )
