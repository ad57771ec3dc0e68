"""One node of a program replaced by the nodes that do its work, without tracing the program again."""

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from ....models.program import walk
from ...policy.classes import Rule, Trait, has
from .policy import OpLists

Work = Callable[[Any, Any], Any]  # (args, kwargs) → the node's result
Decompositions = dict[Any, Callable[..., Any]]  # by operation

_INHERITED = ("nn_module_stack", "stack_trace", "source_fn_stack", "custom")


def fake_mode(module: GraphModule) -> FakeTensorMode:
    """The fake mode in which the program was captured: its free sizes are symbols there."""
    for _, node in walk(module):
        if isinstance(value := node.meta.get("val"), FakeTensor):
            return value.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv())


def traced(
    node: Node, owner: GraphModule, work: Work, mode: FakeTensorMode, table: Decompositions | None = None
) -> GraphModule | None:
    """``work`` on the node's arguments, traced as a graph; its inputs are ``node.all_input_nodes`` in their order.

    None where the value of some input is not known (a node without ``meta["val"]``). ``table``: composite operations,
    and those in the table, are traced as the operations that they consist of.
    """
    sources = node.all_input_nodes
    values = [_value(source, owner, mode) for source in sources]
    if any(value is None for value in values):
        return None

    def run(*given: Any) -> Any:
        known = dict(zip(sources, given, strict=True))
        return work(*(map_arg(part, known.__getitem__) for part in (node.args, node.kwargs)))

    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inner = make_fx(run, table, tracing_mode="real", pre_dispatch=table is None)(*values)
    finally:
        mode.allow_non_fake_inputs = allowed
    inner.graph.eliminate_dead_code()
    return inner


def put_in_place(node: Node, inner: GraphModule, owner: GraphModule) -> list[Node]:
    """Replace ``node`` by the nodes of ``inner`` (`traced`), which are given back."""
    made: dict[Node, Any] = {}
    sources = iter(node.all_input_nodes)
    with node.graph.inserting_before(node):
        for one in inner.graph.nodes:
            if one.op == "placeholder":
                made[one] = next(sources)
            elif one.op == "get_attr":
                name = f"{node.name}_{one.name}"
                owner.register_buffer(name, attrgetter(str(one.target))(inner))
                made[one] = node.graph.get_attr(name)
            elif one.op == "call_function":
                made[one] = _copied(one, node, made)
    (result,) = inner.graph.output_node().args
    _use_instead(node, map_arg(result, made.__getitem__))
    return [made[one] for one in inner.graph.nodes if one.op == "call_function"]


def _value(node: Node, owner: GraphModule, mode: FakeTensorMode) -> Any:
    """The node's result as a fake tensor or a symbolic size."""
    if (value := node.meta.get("val")) is not None:
        return value
    if node.op == "get_attr" and isinstance(weight := attrgetter(str(node.target))(owner), Tensor):
        return mode.from_tensor(weight.detach(), static_shapes=True)
    return None


def _copied(one: Node, node: Node, made: dict[Node, Any]) -> Node:
    args: Any = map_arg(one.args, made.__getitem__)
    kwargs: Any = map_arg(one.kwargs, made.__getitem__)
    copied = node.graph.create_node(one.op, one.target, args, kwargs, name=f"{node.name}_{one.name}")
    copied.meta = {key: node.meta[key] for key in _INHERITED if key in node.meta}
    copied.meta["val"] = one.meta.get("val")
    return copied


def _use_instead(node: Node, result: Any) -> None:
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:  # an op that gives several tensors: its users take them one by one
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def open_composites(module: GraphModule, lists: OpLists) -> GraphModule:
    """Replace, in place, every composite op that is on no list and calls one that is; bodies included.

    torch's autocast acts on every op that a composite one (``CompositeImplicitAutograd``: einsum, tensordot, square, a
    reflecting pad, …) calls, unless the composite is on a list itself. A plan with einsum as one node would run its
    product in FP32, and square's power in half. So such a node is replaced by the ops that torch's own decomposition
    calls: the same kernels, each of them a node that the plan can decide about.

    ``module`` is an original program (`models.program.runnable`); its FP32 answers stay the same bit for bit.
    """
    mode = fake_mode(module)
    for graph in list(dict.fromkeys(node.graph for _, node in walk(module))):
        owner = graph.owning_module
        assert isinstance(owner, GraphModule)
        waiting = list(graph.nodes)
        while waiting:
            node = waiting.pop()
            if (inner := _opened(node, owner, lists, mode)) is not None:
                waiting += put_in_place(node, inner, owner)
        owner.recompile()
    return module


def _opened(node: Node, owner: GraphModule, lists: OpLists, mode: FakeTensorMode) -> GraphModule | None:
    """The ops that a node calls, where the lists act on one of them."""
    if not _is_composite(node, lists):
        return None
    op = node.target
    assert isinstance(op, OpOverload)

    def decomposed(args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # under one of its modes `decompose` calls the op itself
            return op.decompose(*args, **kwargs)

    try:
        inner = traced(node, owner, decomposed, mode)
    except RuntimeError:  # it asks for the values of a tensor, as a quantile does for its levels
        return None
    if inner is None or not any(_matters(one, inner, lists, mode) for one in inner.graph.nodes):
        return None
    return inner


def _matters(node: Node, owner: GraphModule, lists: OpLists, mode: FakeTensorMode) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    return lists.rule(node.target) is not Rule.INPUT or _opened(node, owner, lists, mode) is not None


def _is_composite(node: Node, lists: OpLists) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return False
    name = op._schema.name.removeprefix("aten::")
    # Sizes call themselves.
    gives_tensors = any("Tensor" in str(result.type) for result in op._schema.returns)
    return (
        gives_tensors
        and name != "where"  # it and copies only rearrange: tracing each to see that would take time
        and not has(name, Trait.COPIES, Trait.RECURRENT)
        and lists.rule(op) is Rule.INPUT
        and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )
