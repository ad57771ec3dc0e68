"""Recordings on a real device: the claims that the simulated one holds. Skipped, and counted, without a device."""

from typing import Any

import pytest
import torch
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.engines.true_fp32 import use_true_fp32

from tests.models.engines.adding_nets import ADDS, Added
from tests.models.engines.recorded_runs import DEPTHS, IN_FLIGHT, SIZES, net, recorded_on, wrong_of
from tests.models.engines.simulated_runs import rows
from tests.programs import original

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def true_fp32() -> None:
    use_true_fp32()


@pytest.mark.parametrize("depth", DEPTHS)
def test_recorded_batches_on_their_way_together_are_right(depth: int) -> None:
    for sizes in SIZES:
        for in_flight in IN_FLIGHT:
            one = net(depth, depth % 4)
            there = recorded_on(CUDA, one, sizes, in_flight)
            assert [wrong_of(there, one, sizes, seed) for seed in range(8)] == [0] * 8
            there.close()


def test_an_engine_that_is_closed_harms_no_recording_of_another() -> None:
    one = net(3, 0)
    first, kept, last = (recorded_on(CUDA, one, (2, 4)) for _ in range(3))
    for other in (first, last):
        other.close()
        torch.cuda.empty_cache()
        assert wrong_of(kept, one, (2, 4), 0) == 0
    kept.close()


def test_a_capture_that_fails_leaves_the_device_and_its_allocator_as_they_were() -> None:
    one = net(3, 0)
    there = TorchEngine(one.program, "fp32", CUDA)
    program = there._module

    def waits(x: torch.Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing():
            x.sum().item()
        return program(x)

    there._module = waits  # type: ignore[assignment]
    there.warm_up(rows(4))
    with pytest.raises(RuntimeError, match="captur"):
        there.record(rows(4))
    torch.cuda.empty_cache()
    assert wrong_of(there, one, (4,), 0) == 0
    there._module = program
    there.record(rows(4))
    assert wrong_of(there, one, (4,), 0) == 0
    there.close()


@pytest.mark.parametrize("operation", ADDS)
def test_what_adds_in_any_order_is_recorded(operation: str) -> None:
    there = TorchEngine(original(Added(ADDS[operation]), {"x": torch.rand(8, 24)}).program, "fp32", CUDA)
    there.warm_up(rows(4))
    there.record(rows(4))
    there.close()
