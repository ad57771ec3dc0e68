"""Composite ops replaced by the ops that they call, where autocast's lists name one of those.

torch's autocast acts on every op that a composite one (``CompositeImplicitAutograd``: einsum, tensordot, square,
a reflecting pad, …) calls, unless the composite is on a list itself. A plan with einsum as one node would run its
product in FP32, and square's power in half. So such a node is replaced by the ops that torch's own decomposition
calls: the same kernels, each of them a node that the plan can decide about.
"""

from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from ....models.program import walk
from ...policy.classes import Rule, Trait, has
from .policy import OpLists
from .surgery import fake_mode, put_in_place, traced


def open_composites(module: GraphModule, lists: OpLists) -> GraphModule:
    """Replace, in place, every composite op that is on no list and calls one that is; bodies included.

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

    inner = traced(node, owner, decomposed, mode)
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
