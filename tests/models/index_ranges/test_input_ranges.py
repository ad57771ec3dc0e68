"""The range of an input is what its tables have rows for: the kernels answer just inside and refuse just outside."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from halfeven.models.errors import BadFolder
from halfeven.models.index_ranges.input_ranges import unproven_sites, with_ranges
from halfeven.models.index_ranges.sites import index_sites
from halfeven.models.program import runnable
from halfeven.models.spec.spec import Dim, ModelSpec
from halfeven.models.spec.value_range import ValueRange
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.index_nets import COLUMNS, GUARDED, PROVEN, RANGED, Binned, Picked, Roberta, captured
from tests.programs import Original, original

LEAST, MOST = -150, 250  # tried; no table here has as many rows
INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class Net:
    spec: ModelSpec
    module: GraphModule

    def answers(self, ids: Tensor) -> bool:
        try:
            with torch.inference_mode():
                self.module(ids)
        except (IndexError, RuntimeError):
            return False
        return True


@cache
def named(name: str) -> Net:
    return graph_of(captured(name))


def graph_of(net: Original) -> Net:
    return Net(net.spec, runnable(net.program))


def derived(net: Net) -> ModelSpec:
    return with_ranges(net.spec, net.module)


def admitted(net: Net, column: int | None = None) -> list[int]:
    """The values that the kernels themselves take, everywhere or in one column beside ones."""
    found = []
    for value in range(LEAST, MOST):
        ids = torch.full((2, 5), 1)
        ids[:, slice(None) if column is None else column] = value
        if net.answers(ids):
            found.append(value)
    return found


@pytest.mark.parametrize("name", RANGED)
def test_the_range_is_what_the_kernels_take(name: str) -> None:
    net = named(name)
    taken = admitted(net)
    found = derived(net).inputs[0].range
    assert taken == list(range(taken[0], taken[-1] + 1)), "the range of this net has no holes"
    assert found is not None and len(found.low) == 1
    low, high = max(found.low[0], LEAST), min(found.high[0], MOST - 1)
    assert (low, high) == (taken[0], taken[-1])


@pytest.mark.parametrize("name", RANGED)
def test_where_the_inputs_are_in_range_nothing_is_left_to_prove(name: str) -> None:
    net = named(name)
    assert index_sites(net.module)
    assert not unproven_sites(net.module, derived(net))
    assert unproven_sites(net.module, net.spec) and unproven_sites(net.module, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_has_the_range_of_its_own_table(name: str) -> None:
    net = named(name)
    exact = derived(net)
    found = exact.inputs[0].range
    assert found is not None and len(found.low) == 5
    for column in range(5):
        taken = admitted(net, column)
        ends = max(found.low[column], LEAST), min(found.high[column], MOST - 1)
        assert ends == (taken[0], taken[-1]) and len(taken) == taken[-1] - taken[0] + 1
    assert not unproven_sites(net.module, exact)


@pytest.mark.parametrize("name", PROVEN)
def test_an_index_that_is_in_range_whatever_is_sent_asks_nothing(
    name: str, random: np.random.Generator
) -> None:
    net = named(name)
    assert derived(net).inputs[0].range is None
    assert not unproven_sites(net.module, None)
    assert net.answers(torch.from_numpy(random.integers(INT64.min, INT64.max, (9, 5))))


@pytest.mark.parametrize("name", GUARDED)
def test_a_request_that_the_kernels_answer_is_in_range(name: str, random: np.random.Generator) -> None:
    """A range is necessary: what it does not decide is left to the guard."""
    net = named(name)
    exact = derived(net)
    assert unproven_sites(net.module, exact)
    drawn = random.integers(-3, 9, (300, 1, 5))
    drawn[random.random(drawn.shape) < 0.2] = -100
    taken = [ids for ids in drawn if net.answers(torch.from_numpy(ids))]
    assert taken
    for ids in taken:
        exact.check_values([ids])


def test_positions_counted_in_a_mask_are_left_to_the_guard() -> None:
    net = graph_of(original(Roberta(), {"ids": torch.ones(4, 6, dtype=torch.int64)}, {1: Dim(2, 12)}))
    assert derived(net).inputs[0].range == ValueRange((0,), (49,))
    (site,) = unproven_sites(net.module, derived(net))
    assert site.size == 14


def test_indices_along_a_free_dimension_are_left_to_the_guard() -> None:
    inputs = {"x": torch.randn(4, 6), "which": torch.zeros(4, 6, dtype=torch.int64)}
    net = graph_of(original(Picked(), inputs, {1: Dim(2, 12, "length")}))
    exact = derived(net)
    assert exact.inputs[1].range is None
    assert [site.size for site in unproven_sites(net.module, exact)] == [
        site.size for site in index_sites(net.module)
    ]


@pytest.mark.slow
def test_positions_along_a_bounded_axis_are_proven_and_along_a_free_one_guarded() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.arange(x.shape[1]))[:, 0]

    bounded, free = (
        graph_of(original(Positions(), {"x": torch.randn(4, 6)}, {1: dim})) for dim in (Dim(2, 12), Dim(2))
    )
    assert not unproven_sites(bounded.module, derived(bounded))
    assert len(unproven_sites(free.module, derived(free))) == 1


def test_what_floats_compute_is_not_known() -> None:
    net = graph_of(original(Binned(), {"x": torch.rand(4, 3)}))
    assert derived(net) == net.spec
    assert len(unproven_sites(net.module, net.spec)) == 1


def test_ids_of_fewer_bits_than_a_table_has_rows_need_no_range() -> None:
    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(256, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids.int()).sum(1)

    net = graph_of(original(Bytes(), {"ids": torch.ones(4, 5, dtype=torch.uint8)}))
    assert derived(net).inputs[0].range is None
    assert not unproven_sites(net.module, None)


def test_a_narrower_range_of_the_model_folder_stays() -> None:
    net = named("an embedding")
    own = replace(net.spec, inputs=(replace(net.spec.inputs[0], range=ValueRange((1,), (20,))),))
    assert with_ranges(own, net.module) == own
    wide = replace(net.spec, inputs=(replace(net.spec.inputs[0], range=ValueRange((0,), (50,))),))
    with pytest.raises(
        BadFolder, match=r"input 'ids' of 'net': model.toml says range = 0..50, .* rows 0..49"
    ):
        with_ranges(wide, net.module)
