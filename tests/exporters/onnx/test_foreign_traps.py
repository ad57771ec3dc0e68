"""Every graph that breaks converters comes out loadable, checked, and equal on inputs that nobody planned with."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.exporters.onnx.onnx_files import ConvertedFile, convert, errors_u
from tests.exporters.onnx.traps import EVERY_RUN, FOREIGN, Trap
from tests.slow import slow_but


def converted(trap: Trap, path: Path, level: str) -> ConvertedFile:
    samples = trap.inputs(np.random.default_rng(11), 32)
    return convert(path, trap.model(), samples, level, max_batch_size=trap.max_batch_size)


def fresh(trap: Trap, foreign: ConvertedFile) -> list[dict[str, np.ndarray]]:
    """Batches of 1 and more, or single samples where the model is not batched or its samples depend on each other."""
    most = foreign.spec.max_batch_size
    if most == 0:
        samples = trap.inputs(np.random.default_rng(), 8)
        return [{name: array[i] for name, array in samples.items()} for i in range(8)]
    return [trap.inputs(np.random.default_rng(), rows) for rows in (1, min(most, 3), *[most] * 6)]


@pytest.mark.parametrize(
    ("name", "level"),
    slow_but(
        {(name, "O1") for name in EVERY_RUN},
        [(name, level) for name, trap in FOREIGN.items() for level in trap.levels],
    ),
)
def test_every_trap_is_cured_at_both_ends_of_the_levels(name: str, level: str, tmp_path: Path) -> None:
    trap = FOREIGN[name]
    foreign = converted(trap, tmp_path, level)
    assert foreign.half is not None and foreign.half_nodes > 0
    assert level == "O3" or len(foreign.kept) <= trap.most_kept, foreign.kept
    onnx.checker.check_model(foreign.half, full_check=True)
    errors = errors_u(foreign, *fresh(trap, foreign))
    assert max(errors.values()) <= trap.limit_u, (errors, foreign.kept)
