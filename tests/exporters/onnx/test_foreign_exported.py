"""Files that torch.onnx writes, old optimiser and all, go the foreign road like anybody else's."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.exporters.onnx.exported_nets import NETS, exported
from tests.exporters.onnx.onnx_files import convert, errors_u
from tests.slow import slow_part_but


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize(
    ("name", "level"),
    slow_part_but(8, {("encoder", "O1")}, [(name, level) for name in NETS for level in ("O1", "O2", "O3")]),
)
def test_what_torch_exports_converts_and_is_equal(name: str, level: str, tmp_path: Path) -> None:
    net = NETS[name]
    samples = net.inputs(np.random.default_rng(2), 16)
    foreign = convert(tmp_path, exported(name), samples, level, max_batch_size=net.max_batch_size)
    assert foreign.half is not None and foreign.half_nodes > 0
    onnx.checker.check_model(foreign.half, full_check=True)
    assert level != "O1" or len(foreign.kept) <= net.most_kept, foreign.kept
    rows = [1] * 20 if foreign.spec.max_batch_size == 1 else [1, 3, 8, 8, 8]
    random = np.random.default_rng()
    errors = errors_u(foreign, *(net.inputs(random, n) for n in rows))
    assert max(errors.values()) <= 4.0, (errors, foreign.kept)


@pytest.mark.slow
def test_the_files_list_initialisers_in_value_info_and_that_does_no_harm() -> None:
    model = exported("encoder")
    known = {tensor.name for tensor in model.graph.initializer}
    assert known & {value.name for value in model.graph.value_info}
