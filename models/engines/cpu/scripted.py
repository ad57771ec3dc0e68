"""A straight program handed to torch's TorchScript interpreter, which runs it without Python's lock.

Run as Python, a program needs Python's lock after each operation, and waits while another thread holds it (the event
loop reading JSON). Measured on two cores beside a thread that never releases the lock by itself: an encoder's batch of
eight takes 0.07 s instead of 0.86 s. Without such a thread, 2 to 15 % less, since no operation is called from Python
either. The operations are the same in the same order, and so are the bits: nothing is optimised.
Programs with control flow, or with an operation that TorchScript does not know, stay as they are.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import Graph, Value
from torch.fx import GraphModule, Node

_Outputs = tuple[Tensor, ...]
_TENSOR = torch._C.TensorType.get()
# The operations on two integers that are sizes.
_ON_SIZES: dict[Any, str] = {
    operator.add: "aten::add",
    operator.sub: "aten::sub",
    operator.mul: "aten::mul",
    operator.floordiv: "aten::floordiv",
}
# c10/core/MemoryFormat.h; TorchScript knows them as numbers.
_MEMORY_FORMATS = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
}  # fmt: skip


class _NotStraight(Exception):
    """A program that stays in Python."""


def without_the_lock(module: GraphModule) -> Callable[..., _Outputs]:
    """The program ``module`` as a function that releases Python's lock while it runs; the module itself where that is
    impossible. The function has the module's weights and nothing else of it."""
    try:
        written = _Writing(module)
        run = torch._C._create_function_from_graph("program", written.graph)
    except (_NotStraight, RuntimeError, TypeError, AttributeError):  # torch's own, for what it does not know
        return module
    return Straight(run, torch._C.ScriptList(written.weights))


class Straight:
    """A program of TorchScript, not optimised: its optimisations compile again for each shape and may change bits.

    ``weights`` are held outside of Python, so that counting their references needs no lock.
    """

    def __init__(self, run: Callable[..., _Outputs], weights: torch._C.ScriptList) -> None:
        self._run = run
        self.weights = weights

    def __call__(self, *inputs: Tensor) -> _Outputs:
        # The flag is the thread's, and a live model's own TorchScript may want it.
        before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            return self._run(*inputs, self.weights)
        except RuntimeError as error:
            raise RuntimeError(_what_torch_said(error)) from error
        finally:
            torch._C._set_graph_executor_optimize(before)


def _what_torch_said(error: RuntimeError) -> str:
    """The error's own message, without TorchScript's lines around it, which are about generated source."""
    return str(error).partition("RuntimeError: ")[2].strip() or str(error)


class _Writing:
    """A graph of TorchScript that takes the inputs and then the list of weights."""

    def __init__(self, module: GraphModule) -> None:
        self.graph = Graph()
        self.values: dict[Node, Value | list[Value]] = {}
        nodes = list(module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.addInput(node.name)
        self._take_weights(module, [node for node in nodes if node.op == "get_attr"])
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                self._give(node.args[0])
            elif node not in self.values:
                raise _NotStraight
        self.graph.lint()

    def _take_weights(self, module: GraphModule, nodes: list[Node]) -> None:
        found = [operator.attrgetter(str(node.target))(module) for node in nodes]
        self.weights = [tensor.detach() for tensor in found if isinstance(tensor, Tensor)]
        if len(self.weights) != len(nodes):  # the body of a condition or a loop
            raise _NotStraight
        listed = self.graph.addInput("weights")
        listed.setType(torch._C.ListType(_TENSOR))
        self.values |= zip(
            nodes, self._append("prim::ListUnpack", [listed], [_TENSOR] * len(nodes)), strict=True
        )

    def _give(self, outputs: Any) -> None:
        values = [self._value(node) for node in outputs]
        types = torch._C.TupleType([value.type() for value in values])
        self.graph.registerOutput(self._append("prim::TupleConstruct", values, [types])[0])

    def _call(self, node: Node) -> Value | list[Value]:
        if node.target is operator.getitem:
            return self._item(*node.args)
        if node.target in _ON_SIZES:
            sizes = [self._value(size) for size in node.args]
            return self._append(_ON_SIZES[node.target], sizes, [torch._C.IntType.get()])[0]
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.returns:  # an assertion of a value
            raise _NotStraight
        given = [_argument_of(node, place, declared) for place, declared in enumerate(schema.arguments)]
        types = [declared.type for declared in schema.arguments]
        numbers = [
            place
            for place, value in enumerate(given)
            if isinstance(value, float | int) and types[place] == _TENSOR
        ]
        if numbers and schema.name.endswith("_"):
            # `aten::mul_.Scalar` rounds the number to half first. In place the result's type is not the number's.
            for place in numbers:
                given[place] = _as_tensor(given[place])
        elif numbers:
            schema = _for_a_number(node.target)
            types = [declared.type for declared in schema.arguments]
        arguments = [self._argument(value, kind) for value, kind in zip(given, types, strict=True)]
        outputs = self._append(schema.name, arguments, [one.type for one in schema.returns])
        # TorchScript chooses the overload by the arguments' types.
        if outputs[0].node().schema() != str(schema):
            raise _NotStraight
        return outputs[0] if len(outputs) == 1 else outputs

    def _item(self, several: Any, place: Any) -> Value:
        """One of an operation's results, or of the tensors in its list."""
        found = self.values[several]
        if isinstance(found, list):
            return found[place]
        return self._append("aten::__getitem__", [found, self._value(place)], [_TENSOR])[0]

    def _argument(self, value: Any, declared: Any) -> Value:
        while isinstance(declared, torch._C.OptionalType) and value is not None:
            declared = declared.getElementType()
        if isinstance(value, (list, tuple)) and (not value or any(isinstance(one, Node) for one in value)):
            inner = declared.getElementType()
            return self._append(
                "prim::ListConstruct", [self._argument(one, inner) for one in value], [declared]
            )[0]
        if declared.kind() == "FloatType" and isinstance(value, int):
            value = float(value)
        return self._value(value)

    def _value(self, value: Any) -> Value:
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        if not isinstance(value, Node):
            return self.graph.insertConstant(value)  # type: ignore[attr-defined]  # not in torch's stubs
        found = self.values[value]
        if isinstance(found, list):
            raise _NotStraight
        return found

    def _append(self, kind: str, inputs: list[Value], types: list[Any]) -> list[Value]:
        node = self.graph.appendNode(self.graph.create(kind, inputs, len(types)))
        outputs = list(node.outputs())
        for output, declared in zip(outputs, types, strict=True):
            output.setType(declared)
        return outputs


def _argument_of(node: Node, place: int, declared: Any) -> Any:
    if place < len(node.args) and not declared.kwarg_only:
        return node.args[place]
    if declared.name in node.kwargs:
        return node.kwargs[declared.name]
    if declared.has_default_value():
        return declared.default_value
    raise _NotStraight


def _as_tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def _for_a_number(target: Any) -> Any:
    """The overload that takes a number where this one takes a tensor; torch makes the same tensor of it in both."""
    overloads = target.overloadpacket
    if target._overloadname != "Tensor" or "Scalar" not in overloads.overloads():
        raise _NotStraight
    return overloads.Scalar._schema
