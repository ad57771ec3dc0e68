"""A program that was exported for one row is made to take any number of rows.

The batch is followed by the shapes of one row and of many, on tensors without memory. Where the graph says 1 for it, it
is rewritten: the sizes of views and expansions. What is the same for every row is repeated where it is joined to rows
or is an initial state. What comes out is a candidate, which the child checks as any program (``agreement.py``).

Runs in the child.
"""

import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .batch_place import place_of_batch

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

Request = Mapping[str, Any]

MANY = 1009  # rows: a prime that no size of a model is likely to have as a factor
VIEWS = ("view", "reshape", "_unsafe_view")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def axes_of(program: "ExportedProgram", request: Request) -> dict[str, int]:
    """The batch axis of each of the program's inputs, by its name."""
    names, ours = (
        [str(name) for name in program.graph_signature.user_inputs],
        [spec["name"] for spec in request["inputs"]],
    )
    axes = request.get("batch_axes", {}).get("inputs", {})
    same = sorted(names) == sorted(ours)
    return {name: axes.get(name if same else other, 0) for name, other in zip(names, ours, strict=False)}


def is_for_one_row(torch: ModuleType, request: Request) -> bool:
    """True if the batch of the request's program is 1 where model.toml has a free one."""
    if request["max_batch_size"] < 2:
        return False
    program = torch.export.load(Path(request["folder"]) / request["source"])
    axes = axes_of(program, request)
    shapes = {n.name: n.meta["val"].shape for n in program.graph.nodes if n.name in axes}
    sizes = [shapes[name][axis] for name, axis in axes.items() if axis < len(shapes[name])]
    return bool(sizes) and all(isinstance(size, int) and size == 1 for size in sizes)


def free(torch: ModuleType, module: Any, axes: Mapping[str, int]) -> None:
    """Rewrite the graph of ``module``, which takes more rows from then on, if it can; its checks of sizes go."""
    _Freeing(torch, module, axes).run()
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    module.recompile()


class _Freeing:
    def __init__(self, torch: ModuleType, module: Any, axes: Mapping[str, int]) -> None:
        self.torch, self.module, self.axes = torch, module, axes
        self.one, self.many = {}, {}  # node → its value for one row, and for many
        self.rows = {}  # node → axis of its batch, elements of that axis in front of it
        self.from_inputs = set()
        self.source = None  # an input and its batch axis

    def run(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True), self.torch.no_grad():
            for node in list(self.module.graph.nodes):
                if node.op == "placeholder":
                    self.take(node)
                elif node.op == "get_attr":
                    self.one[node] = self.many[node] = attrgetter(node.target)(self.module)
                elif node.op == "call_function":
                    self.compute(node)

    def take(self, node: Any) -> None:
        shape, axis = list(node.meta["val"].shape), self.axes[node.name]
        for values, rows in ((self.one, 1), (self.many, MANY)):
            sizes = [rows if place == axis else int(size) for place, size in enumerate(shape)]
            values[node] = self.torch.empty(sizes, dtype=node.meta["val"].dtype)
        self.from_inputs.add(node)
        self.source = self.source or (node, axis)
        self.follow(node, None)

    def compute(self, node: Any) -> None:
        self.one[node] = self.value(node, self.one)
        self.rewrite(node)
        self.many[node] = self.value(node, self.many)
        if not self.from_inputs.isdisjoint(node.all_input_nodes):
            self.from_inputs.add(node)
        self.follow(node, next((each for each in node.all_input_nodes if each in self.rows), None))

    def value(self, node: Any, values: dict[Any, Any]) -> Any:
        from torch.fx.node import map_arg

        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)

    def follow(self, node: Any, source: Any) -> None:
        one, many = getattr(self.one[node], "shape", None), getattr(self.many[node], "shape", None)
        if one is None or many is None or len(one) != len(many):
            return
        longer = [axis for axis in range(len(one)) if one[axis] != many[axis]]
        if len(longer) != 1 or many[longer[0]] != MANY * one[longer[0]]:
            return
        (axis,), before = longer, 1
        if source is not None and name_of(node) in VIEWS:
            before = max(1, self.in_front(source) // max(1, math.prod(one[:axis])))
        elif source is not None and one[axis] % self.rows[source][1] == 0:
            before = self.rows[source][1]
        self.rows[node] = (axis, before)

    def in_front(self, node: Any) -> int:
        axis, before = self.rows[node]
        return math.prod(self.one[node].shape[:axis]) * before

    def rewrite(self, node: Any) -> None:
        name = name_of(node)
        first = node.args[0] if node.args else None
        if name in VIEWS and first in self.rows:
            sizes = list(self.one[node].shape)
            axis = place_of_batch(sizes, self.in_front(first))
            if axis is not None:
                sizes[axis] = -1
                node.update_arg(1, sizes)
        elif name == "expand" and first in self.rows:
            place = self.rows[first][0] + len(node.args[1]) - self.one[first].dim()
            node.update_arg(1, [-1 if at == place else size for at, size in enumerate(node.args[1])])
        elif name == "cat":
            carrying = next((each for each in node.args[0] if each in self.rows), None)
            if carrying is not None:
                axis = self.rows[carrying][0]
                node.update_arg(0, [self.repeated(node, each, axis) for each in node.args[0]])
        elif name in RECURRENT and first in self.rows:
            states = node.args[1]
            many = isinstance(states, (list, tuple))
            found = [self.repeated(node, each, 1) for each in (states if many else [states])]
            node.update_arg(1, found if many else found[0])

    def repeated(self, reader: "Node", node: Any, axis: int) -> Any:
        """A node that is the same for every row, repeated for each row; any other node unchanged."""
        shape = list(self.one[node].shape)
        if node in self.from_inputs or len(shape) <= axis or shape[axis] != 1:
            return node
        graph, aten = self.module.graph, self.torch.ops.aten
        with graph.inserting_before(reader):
            count = graph.call_function(aten.sym_size.int, self.source)
            sizes = [count if at == axis else size for at, size in enumerate(shape)]
            made = graph.call_function(aten.expand.default, (node, sizes))
        self.one[count], self.many[count] = 1, MANY
        self.one[made], self.many[made] = self.value(made, self.one), self.value(made, self.many)
        self.follow(made, None)
        return made


def name_of(node: Any) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
