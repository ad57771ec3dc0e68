"""The share of the time in which batches ran."""

from halfeven.serve.http.server_load import Utilisation

SECOND = 1_000_000_000


class ByHand:
    """Seconds of the clock and of the batches, set by the test."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        self.read = Utilisation(lambda: int(self.busy * SECOND), lambda: int(self.now * SECOND)).share

    def after(self, seconds: float, busy: float) -> float:
        self.now += seconds
        self.busy += busy
        return self.read()


def test_the_share_is_that_of_the_last_ten_seconds() -> None:
    hand = ByHand()
    assert hand.after(2, busy=1) == 0.5
    assert [hand.after(1, busy=0) for _ in range(12)][-1] == 0.0, "what was before ten seconds does not count"
    assert hand.after(1, busy=1) == 0.1


def test_reads_within_a_second_give_the_same_value() -> None:
    hand = ByHand()
    hand.after(1, busy=1)
    assert hand.after(0.5, busy=0) == 1.0
    assert hand.after(0.5, busy=0) == 0.5


def test_the_share_stays_between_0_and_1() -> None:
    hand = ByHand()
    assert hand.after(1, busy=3) == 1.0, "two batches at once on one device"
    assert hand.after(20, busy=-3) == 0.0, "a version was unloaded, with its counters"
