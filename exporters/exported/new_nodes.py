"""New nodes that take the place of one node of an ONNX graph. The constants are initialisers of the main graph, which
the nodes of its bodies may read too."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.tape import Tape

from ..onnx.reading.graph import Names

Attributes = int | str | Sequence[int]
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES)


def wide(dtype: ir.DataType) -> ir.DataType:
    """The datatype in which sums of numbers of ``dtype`` are computed: FP32 for FP16 and bfloat16, else ``dtype``."""
    return ir.DataType.FLOAT if dtype in HALVES else dtype


class NewNodes:
    """Collects the nodes that compute the output of ``node``, in order; `put` puts them into the graph.

    ``main``: the main graph. ``names``: the names of all values, to which those of the new values are added.
    """

    def __init__(self, node: ir.Node, main: ir.Graph, names: Names) -> None:
        self._node, self._main, self._names = node, main, names
        self._tape = Tape()

    def op(self, operation: str, *inputs: ir.Value, **attributes: Attributes) -> ir.Value:
        """The output of a new node of ONNX's own domain."""
        return self._tape.op(operation, inputs, attributes)

    def constant(self, array: np.ndarray) -> ir.Value:
        """A new initialiser with the array's shape and datatype."""
        name = self._names.fresh(f"{self._node.outputs[0].name}__constant")
        return self._tape.initializer(ir.tensor(array, name=name))

    def integers(self, *values: int) -> ir.Value:
        """An int64 constant of one axis."""
        return self.constant(np.array(values, np.int64))

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in a datatype; itself where it is known to have it."""
        if value.dtype == dtype:
            return value
        return self.op("Cast", value, to=int(dtype))

    def put(self, value: ir.Value) -> None:
        """``value``, an output of the new nodes, takes the place of the node's only output, with its name."""
        graph, old = self._node.graph, self._node.outputs[0]
        assert graph is not None
        for made in self._tape.nodes:
            made.name = made.outputs[0].name = self._names.fresh(f"{old.name}__{made.op_type.lower()}")
        for constant in self._tape.initializers:
            self._main.register_initializer(constant)
        replace_nodes_and_values(graph, self._node, [self._node], self._tape.nodes, [old], [value])
