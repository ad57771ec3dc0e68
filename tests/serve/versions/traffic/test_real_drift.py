"""A real half whose weights go wrong in memory, under real HTTP traffic: found, replaced, no request fails."""

from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.engines.cpu.scripted import Straight
from halfeven.models.store.store import Store
from halfeven.serve.versions.orders import events

from tests.model_folders import write_folder
from tests.patience import until
from tests.serve.versions.traffic.conftest import serving, traffic

SAMPLED_EVERY = 10


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("drift") / "store")
    folder = write_folder(store.root / "net", max_batch_size=8, form="torch", precision={"level": "O3"})
    facts = convert(folder, store, Options(forms=("torch",)), print).facts
    assert facts["status"] == "live" and facts["forms"]["torch"]["half_nodes"] > 0
    return store


def weights_of(engine: Any) -> list[torch.Tensor]:
    """The matrices that the served program reads: the setup that was measured faster here decides what holds them."""
    program = engine._module
    held = program.weights if isinstance(program, Straight) else [*program.parameters(), *program.buffers()]
    return [tensor for tensor in held if tensor.is_floating_point() and tensor.ndim == 2]


@pytest.mark.slow
def test_a_half_whose_weights_change_in_memory_falls_back_to_its_original(converted: Store) -> None:
    rows = {"x": np.random.default_rng().standard_normal((16, 4), np.float32)}
    with serving(converted, parity_sample=1 / SAMPLED_EVERY) as (address, roster):
        served = roster.find("net")
        assert served.prepared.precision == "fp16"
        with traffic(address, rows=rows) as callers:
            until(lambda: callers.answered > 300)
            assert served.prepared.precision == "fp16", "healthy, it is checked and stays"
            healthy = callers.answered
            weights = weights_of(served.prepared.engine)
            assert weights
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(1.05)
            until(lambda: roster.find("net").prepared.precision == "fp32")
            noticed = callers.answered - healthy
            until(lambda: callers.answered > healthy + noticed + 100)
        assert (callers.failed, callers.faults) == (0, [])
        # Up to ten until one is checked, then five checked ones, every request checked; the rest was on its way.
        print(f"noticed after {noticed} answers")
        assert noticed < 2 * (SAMPLED_EVERY + 5) + 400
    assert [event["kind"] for event in events(converted, "net")] == ["drift", "activated"]
    with serving(converted) as (_, roster):
        assert roster.find("net").prepared.precision == "fp32", "after a restart as well"
