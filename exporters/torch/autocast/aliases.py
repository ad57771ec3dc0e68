"""Nodes of a program that share memory, by the schemas of its operations: views, and what writes through them."""

import operator
from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from ....models.program import walk, writes_into_inputs


def aliased(node: Node, written: bool) -> list[Node]:
    """The arguments that an op writes to, or those that its result may be a view of (by its schema)."""
    if node.target is operator.getitem:
        return [] if written else node.all_input_nodes
    if not isinstance(node.target, OpOverload):
        return []
    found = []
    for position, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if alias is not None and (alias.is_write or not written) and isinstance(value, Node):
            found.append(value)
    return found


def changed_in_place(graph: Graph) -> set[Node]:
    """Nodes whose memory some node writes to, itself or through a view: they are made anew at every run."""
    changed: set[Node] = set()
    stack = [arg for node in graph.nodes for arg in aliased(node, written=True)]
    while stack:
        node = stack.pop()
        if node not in changed:
            changed.add(node)
            stack.extend(aliased(node, written=False))
    return changed


def sharing_written_memory(nodes: Iterable[Node]) -> set[Node]:
    """Nodes whose memory some node writes to, directly or through a view."""
    adjacent: dict[Node, set[Node]] = {node: set() for node in nodes}
    for node in adjacent:
        for source in aliased(node, written=False):
            adjacent[node].add(source)
            adjacent[source].add(node)
    stack = [source for node in adjacent for source in aliased(node, written=True)]
    found: set[Node] = set()
    while stack:
        if (node := stack.pop()) not in found:
            found.add(node)
            stack.extend(adjacent[node])
    return found


def uncastable(module: GraphModule) -> set[str]:
    """The qualified names of the nodes that write into their input, and of the views of memory that a later node writes
    to. No dtype may be given to their inputs: the cast makes a copy, and what is written into it is lost."""
    later = dict[Graph, set[Node]]()
    for _, node in walk(module):
        if node.graph not in later:
            later[node.graph] = _views_written_later(node.graph)
    return {
        name for name, node in walk(module) if node in later[node.graph] or writes_into_inputs(node.target)
    }


def _views_written_later(graph: Graph) -> set[Node]:
    """Views that share memory with what a later node of the graph writes to."""
    memory = dict[Node, set[Node]]()  # of each node: all nodes that share it
    for node in graph.nodes:
        memory[node] = {node}
        for source in aliased(node, written=False):
            joined = memory[node] | memory[source]
            for one in joined:
                memory[one] = joined
    written, found = set[int](), set[Node]()
    for node in reversed(graph.nodes):
        is_view = isinstance(node.target, OpOverload) and aliased(node, written=False)
        if is_view and id(memory[node]) in written:
            found.add(node)
        written |= {id(memory[source]) for source in aliased(node, written=True)}
    return found
