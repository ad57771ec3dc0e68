"""An index out of range never reaches a kernel: the batch is refused, and what is in range keeps every bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.models.archive.archive import save_program
from halfeven.models.archive.plain_program import read_module
from halfeven.models.capture.capture import normalise
from halfeven.models.engines.index_guard import Guard, GuardedLaunch, guard_indices, rows_alone
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import BadRequest
from halfeven.models.index_ranges.input_ranges import with_ranges
from halfeven.models.program import runnable
from halfeven.models.spec.spec import Dim
from torch import Tensor, nn

from tests.index_nets import COLUMNS, GUARDED, PROVEN, RANGED, Binned, Picked, Roberta, captured
from tests.programs import original
from tests.slow import slow_part_but

CPU = torch.device("cpu")
NETS = {**RANGED, **COLUMNS, **GUARDED}


@pytest.mark.parametrize("name", slow_part_but(2, [*NETS][::8], NETS))
def test_no_kernel_sees_an_index_that_is_out_of_range(name: str, random: np.random.Generator) -> None:
    """The kernels of a CPU refuse such an index themselves, those of a CUDA device end it: here none is refused."""
    net = captured(name)
    plain, guarded = runnable(net.program), runnable(net.program)
    guard = guard_indices(guarded, None)
    assert guard is not None
    seen = set[bool]()
    for place in range(40):
        low, high = sorted(random.integers(-60, 60, 2)) if place else (1, 1)
        ids = torch.from_numpy(random.integers(low, high + 1, (3, 5)))
        *answers, flags = guarded(ids)
        try:
            expected = plain(ids)
        except (IndexError, RuntimeError):
            seen.add(False)
            assert flags.any()
            with pytest.raises(
                BadRequest, match=r"out of range for the table .* indexes at .*index_nets\.py:\d+"
            ):
                guard.checked([*answers, flags])
        else:
            seen.add(True)
            assert not flags.any()
            assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True))
    assert True in seen
    for far in (1 << 40, -(1 << 40), 1 << 62):
        guarded(torch.full((3, 5), far))


@pytest.mark.parametrize("name", PROVEN)
def test_a_program_whose_indices_are_proven_is_not_changed(name: str) -> None:
    module = runnable(captured(name).program)
    before = module.code
    assert guard_indices(module, None) is None
    assert module.code == before


@pytest.mark.parametrize("name", ["an embedding", "two tables with an offset", "selected", "a bag"])
def test_on_a_cpu_what_the_spec_proves_is_not_checked_again(name: str) -> None:
    net = captured(name)
    exact = with_ranges(net.spec, runnable(net.program))
    assert guard_indices(runnable(net.program), exact) is None
    assert guard_indices(runnable(net.program), net.spec) is not None


def test_an_engine_refuses_what_floats_lead_out_of_the_table_and_answers_the_rest() -> None:
    net = original(Binned(), {"x": torch.rand(4, 3)})
    engine = TorchEngine(net.program, "fp32", CPU, spec=net.spec)
    good = np.random.default_rng().random((5, 3), np.float32)
    expected = net.run(torch.from_numpy(good))[0].numpy()
    np.testing.assert_array_equal(engine.run([[good]])[0], expected)
    for value in (1.0, -0.1, np.nan, np.inf, 1e30):
        bad = good.copy()
        bad[2, 1] = value
        with pytest.raises(BadRequest, match=r"a table of 10 rows|the table of 10 rows"):
            engine.run([[good[:1], bad]])
    np.testing.assert_array_equal(engine.run([[good]])[0], expected)


def test_positions_beyond_their_table_are_refused_where_the_length_is_free() -> None:
    net = original(Roberta(), {"ids": torch.ones(4, 6, dtype=torch.int64)}, {1: Dim(2)})
    engine = TorchEngine(net.program, "fp32", CPU, spec=with_ranges(net.spec, runnable(net.program)))
    longest = np.full((2, 12), 7)
    expected = net.run(torch.from_numpy(longest))[0].numpy()
    np.testing.assert_array_equal(engine.run([[longest]])[0], expected)
    with pytest.raises(BadRequest, match="14 rows"):
        engine.run([[np.full((2, 13), 7)]])
    padded = np.full((2, 13), 1)  # padding has no position of its own
    padded[:, :12] = 7
    engine.run([[padded]])


def test_an_index_along_a_free_size_is_held_against_the_size_of_its_own_request() -> None:
    inputs = {"x": torch.randn(4, 6), "which": torch.zeros(4, 6, dtype=torch.int64)}
    net = original(Picked(), inputs, {1: Dim(2, 12, "length")})
    engine = TorchEngine(net.program, "fp32", CPU, spec=with_ranges(net.spec, runnable(net.program)))
    for length in (3, 8):
        x = np.random.default_rng().standard_normal((2, length)).astype(np.float32)
        which = np.full((2, length), length - 1)
        np.testing.assert_array_equal(engine.run([[x], [which]])[0], np.repeat(x[:, -1:], length, 1))
        with pytest.raises(BadRequest):
            engine.run([[x], [which + 1]])
        with pytest.raises(BadRequest):  # gather does not count from the end
            engine.run([[x], [which * 0 - 1]])


def test_on_a_device_the_flags_are_looked_at_when_they_have_arrived() -> None:
    class Arrived:
        def __init__(self, *flags: bool) -> None:
            self.flags = np.array(flags)

        def synchronize(self) -> None: ...

        def wait(self) -> list[np.ndarray]:
            return [np.arange(3), self.flags]

    guard = Guard(("the table of 9 rows that 'embedding' indexes", "the table that 'gather' indexes"))
    (answer,) = GuardedLaunch(Arrived(False, False), guard).wait()
    np.testing.assert_array_equal(answer, np.arange(3))
    with pytest.raises(BadRequest, match="the table that 'gather' indexes"):
        GuardedLaunch(Arrived(False, True), guard).wait()


def test_a_program_read_without_torch_export_is_guarded_alike(tmp_path: Path) -> None:
    net = original(Roberta(), {"ids": torch.ones(4, 6, dtype=torch.int64)}, {1: Dim(2)})
    save_program(normalise(net.program), tmp_path / "original.pt2", weights=True)
    module = read_module(tmp_path / "original.pt2")
    assert module is not None
    exact = with_ranges(net.spec, runnable(net.program))
    guard, other = guard_indices(module, exact), guard_indices(runnable(net.program), exact)
    assert guard is not None and other is not None and len(guard.tables) == len(other.tables) == 1
    with pytest.raises(BadRequest):
        guard.checked(module(torch.full((2, 13), 7)))
    guard.checked(module(torch.full((2, 12), 7)))


def test_inputs_have_the_same_rows_on_every_device_and_nothing_else_is_taken_for_granted() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x[torch.arange(ids.shape[0]), ids]

    inputs = {"x": torch.randn(4, 6), "ids": torch.zeros(4, dtype=torch.int64)}
    net = original(Chosen(), inputs)
    exact = with_ranges(net.spec, runnable(net.program))
    assert guard_indices(runnable(net.program), exact) is None
    guard = guard_indices(runnable(net.program), rows_alone(exact))
    assert guard is not None and len(guard.tables) == 1 and "6 rows" in guard.tables[0]
