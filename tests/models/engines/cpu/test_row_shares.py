"""A long batch's rows on several cores: every row once and in its place, the same bits whoever computes them."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from halfeven.models.engines.cpu.row_shares import FEWEST_SHARED, RowShares, shares_of, wait_for_all_shares
from halfeven.models.engines.cpu.setup import SHARED_ROWS, WITHOUT_LOCK, CpuSetup
from halfeven.models.engines.torch_engine import TorchEngine
from torch import Tensor, nn

from tests.control_flow import CONTROL_FLOW
from tests.patience import PATIENCE_S
from tests.programs import original

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cores", [2, 3, 16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 32, 1000])
def test_shares_are_all_the_rows_and_even_with_one_for_each_core_that_gets_two(rows: int, cores: int) -> None:
    shares = shares_of(rows, cores)
    assert sum(shares) == rows and min(shares) > 0
    assert max(shares) - min(shares) <= 1
    assert len(shares) == max(1, min(cores, rows // 2))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33])
def test_every_row_is_answered_once_and_in_its_place(rows: int) -> None:
    shares = RowShares(lambda x, index: [x * 2.0, index + 1], cores=3)
    x, index = torch.randn(rows, 4), torch.arange(rows)
    doubled, next_one = shares.launch(x, index).wait()
    shares.close()
    assert np.array_equal(doubled, x.numpy() * 2.0) and np.array_equal(next_one, index.numpy() + 1)


def test_several_threads_compute_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def program(x: Tensor) -> list[Tensor]:
        both.wait(PATIENCE_S)  # raises where one thread computes share after share
        return [x]

    shares = RowShares(program, cores=2)
    x = torch.randn(8, 2)
    (came,) = shares.launch(x).wait()
    shares.close()
    assert np.array_equal(came, x.numpy())


def test_what_one_share_raised_is_raised_once_nobody_computes_any_more_and_the_next_batch_is_answered() -> (
    None
):
    computing = [0]
    lock = threading.Lock()

    def program(x: Tensor) -> list[Tensor]:
        with lock:
            computing[0] += 1
        try:
            if bool((x < 0).any()):
                raise RuntimeError("no negative rows")
            return [x]
        finally:
            with lock:
                computing[0] -= 1

    shares = RowShares(program, cores=3)
    for place in range(12):
        poisoned = torch.ones(12, 2)
        poisoned[place] = -1.0
        with pytest.raises(RuntimeError, match="no negative rows"):
            shares.launch(poisoned).wait()
        assert computing == [0]
        assert np.array_equal(shares.launch(torch.ones(12, 2)).wait()[0], np.ones((12, 2)))
    shares.close()


def test_a_core_that_is_done_goes_on_with_the_next_batch() -> None:
    """The first share of the first batch ends only once a share of the second has begun."""
    second_began = threading.Event()

    def program(x: Tensor) -> list[Tensor]:
        if x[0, 0] == 0.0:
            assert second_began.wait(PATIENCE_S)
        if bool((x >= 8.0).all()):
            second_began.set()
        return [x]

    shares = RowShares(program, cores=2)
    x = torch.arange(16.0).unsqueeze(1)
    first, second = shares.launch(x[:8]), shares.launch(x[8:])
    assert np.array_equal(first.wait()[0], x[:8].numpy())
    assert np.array_equal(second.wait()[0], x[8:].numpy())
    shares.close()


def test_who_wants_several_threads_in_an_operation_waits_until_no_shares_are_computed() -> None:
    begun, may_end, over = threading.Event(), threading.Event(), threading.Event()

    def program(x: Tensor) -> list[Tensor]:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return [x]

    def waiting() -> None:
        wait_for_all_shares()
        over.set()

    shares = RowShares(program, cores=2)
    wait_for_all_shares()  # there are none
    batch = shares.launch(torch.ones(8, 2))
    assert begun.wait(PATIENCE_S)
    other = threading.Thread(target=waiting)
    other.start()
    assert not over.wait(0.05)
    may_end.set()
    assert over.wait(PATIENCE_S)
    other.join()
    batch.wait()
    shares.close()


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_a_batch_that_is_not_shared_gets_its_threads_back_from_mkl_as_well() -> None:
    net = original(Rows(), {"x": torch.randn(8, 64)})
    engine = TorchEngine(net.program, "fp32", CPU, SHARED, rows_apart=True)
    torch.set_num_threads(1)
    engine.run([[array(16)]])
    assert "mkl_get_max_threads() : 1\n" in torch.__config__.parallel_info()
    engine.run([[array(1)]])
    assert "mkl_get_max_threads() : 3\n" in torch.__config__.parallel_info()
    engine.close()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 600), nn.Linear(600, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.one(x))
        return self.other(hidden), hidden.argmax(-1)


SHARED = CpuSetup(3).having(WITHOUT_LOCK, SHARED_ROWS)


def array(rows: int) -> np.ndarray:
    return np.random.default_rng().standard_normal((rows, 64)).astype(np.float32)


def test_an_engine_whose_rows_are_long_answers_as_the_program_and_repeats_its_bits() -> None:
    net = original(Rows(), {"x": torch.randn(8, 64)})
    engine = TorchEngine(net.program, "fp32", CPU, SHARED, rows_apart=True)
    engine.warm_up([[array(16)]])
    assert engine._shares is not None and engine.in_flight == 2
    helpers = [thread for thread in threading.enumerate() if thread.name.startswith("halfeven-rows")]
    assert len(helpers) <= 3
    for rows in (1, FEWEST_SHARED - 1, FEWEST_SHARED, 33):
        x = array(rows)
        expected = net.run(torch.from_numpy(x.copy()))
        first = engine.run([[x]])
        np.testing.assert_allclose(first[0], expected[0].numpy(), rtol=1e-5, atol=1e-5)
        assert np.array_equal(first[1], expected[1].numpy())
        for _ in range(5):  # whoever takes which share
            again = engine.launch([[x]]).wait()
            assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("halfeven-rows")]


@pytest.mark.slow
def test_rows_stay_together_where_they_are_not_a_batch_or_hold_the_lock_or_have_one_core() -> None:
    program = original(Rows(), {"x": torch.randn(8, 64)}).program
    branches = CONTROL_FLOW["branches"]
    in_python = original(branches.build(), branches.inputs(8)).program
    for engine, left in [
        (TorchEngine(program, "fp32", CPU, SHARED), {WITHOUT_LOCK}),
        (TorchEngine(program, "fp32", CPU, SHARED, rows_apart=True), {WITHOUT_LOCK, SHARED_ROWS}),
        (TorchEngine(program, "fp32", CPU, replace(SHARED, threads=1), rows_apart=True), {WITHOUT_LOCK}),
        (TorchEngine(program, "fp32", CPU, CpuSetup(3).having(SHARED_ROWS), rows_apart=True), set()),
        (TorchEngine(in_python, "fp32", CPU, SHARED, rows_apart=True), set()),
    ]:
        assert engine.setup.passes == left
        assert engine.in_flight == (2 if SHARED_ROWS in left else 1)
        engine.close()
