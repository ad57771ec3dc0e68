"""The device thread's side of a batcher."""

from typing import Any

import pytest
from halfeven.models.errors import EngineFailed

from tests.serve.batching.by_hand import ByHand
from tests.serve.batching.stage import Fake, rows_of


def test_each_request_of_a_batch_that_could_not_be_run_gets_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python adds the frames of every `await` that raises an exception to the exception's traceback. If all callers
    got one exception, it would keep the frames of all of them in memory, with their requests."""
    hand = ByHand(Fake())

    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(hand.scheduler, "_fill_up", fail)
    hand.send(rows_of(1), rows_of(2))
    hand.finish()
    one, other = hand.answered[0], hand.answered[1]
    assert isinstance(one, EngineFailed) and isinstance(other, EngineFailed) and one is not other
    assert str(one) == str(other) == "MemoryError: no more"
