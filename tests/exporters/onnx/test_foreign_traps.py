"""Every graph that breaks converters comes out loadable, checked, and equal on inputs that nobody planned with."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.onnx.precision.rewrite import HalfGraph
from halfeven.exporters.onnx.reading.graph import graphs, walk
from halfeven.exporters.onnx.reading.typing import value_types
from onnx import TensorProto

from tests.exporters.onnx.onnx_files import ConvertedFile, convert, errors_u
from tests.exporters.onnx.traps import EVERY_RUN, FOREIGN, Trap
from tests.slow import slow_part_but

FLOATING = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}


def converted(trap: Trap, path: Path, level: str) -> ConvertedFile:
    samples = trap.inputs(np.random.default_rng(11), 32)
    return convert(path, trap.model(), samples, level, max_batch_size=trap.max_batch_size)


def fresh(trap: Trap, foreign: ConvertedFile) -> list[dict[str, np.ndarray]]:
    """Batches of 1 and more, or single samples of a model without a batch."""
    most = foreign.spec.max_batch_size
    if most == 0:
        samples = trap.inputs(np.random.default_rng(), 8)
        return [{name: array[i] for name, array in samples.items()} for i in range(8)]
    return [trap.inputs(np.random.default_rng(), rows) for rows in (1, min(most, 3), *[most] * 6)]


@pytest.mark.parametrize(
    ("name", "level"),
    slow_part_but(  # of every fourth trap one of the two levels
        8,
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
    no_value_is_cast_twice_and_no_name_stands_twice(foreign, foreign.half)
    errors = errors_u(foreign, *fresh(trap, foreign))
    assert max(errors.values()) <= trap.limit_u, (errors, foreign.kept)


def floating_casts(graph: HalfGraph | None) -> int:
    """Casts that change one floating type into another."""
    assert graph is not None
    types = value_types(graph.model, graph.weights)
    pairs = [{types[n.input[0]], types[n.output[0]]} for n in walk(graph.model.graph) if n.op_type == "Cast"]
    return sum(len(pair) == 2 and pair <= FLOATING for pair in pairs)


def no_value_is_cast_twice_and_no_name_stands_twice(foreign: ConvertedFile, half: onnx.ModelProto) -> None:
    inserted = set(foreign.written.half_graph.casts) if foreign.written.half_graph else set()
    casts = [node for node in walk(half.graph) if node.name in inserted]
    assert len(casts) <= foreign.written.casts == floating_casts(foreign.written.half_graph)
    assert max(Counter(node.input[0] for node in casts).values(), default=1) == 1
    made = Counter(name for node in walk(half.graph) for name in node.output if name)
    made.update(value.name for graph in graphs(half.graph) for value in graph.input)
    made.update(tensor.name for tensor in half.graph.initializer)
    assert max(made.values()) == 1
    assert max(Counter(node.name for node in walk(half.graph)).values()) == 1
