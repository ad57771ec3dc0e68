"""The last layer on every way to an output of a captured program: its head."""

from collections.abc import Collection

from torch.export import ExportedProgram
from torch.fx import Node


def head_of(program: ExportedProgram, outputs: Collection[int]) -> list[str]:
    """The names of the parameters that stand last before the outputs at these positions: on each way back from an
    output those of the first node with a matrix or kernel, and of norms and scales before it. Empty: there are none."""
    named = program.graph_signature.inputs_to_parameters
    made_of = _made_of_parameters(program)
    results = program.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    waiting = [node for at, node in enumerate(results) if at in outputs and isinstance(node, Node)]
    found, seen = set[str](), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        read = {name for one in node.all_input_nodes for name in made_of.get(one, ())}
        found |= read
        if not any(program.state_dict[name].ndim >= 2 for name in read):
            waiting += node.all_input_nodes
    order = list(named.values())
    return sorted(found, key=order.index)


def _made_of_parameters(program: ExportedProgram) -> dict[Node, frozenset[str]]:
    """The nodes that are computed from parameters alone (a transposed weight), and from which."""
    named, found = program.graph_signature.inputs_to_parameters, dict[Node, frozenset[str]]()
    for node in program.graph.nodes:
        if node.name in named:
            found[node] = frozenset({named[node.name]})
        elif node.all_input_nodes and all(one in found for one in node.all_input_nodes):
            found[node] = frozenset().union(*(found[one] for one in node.all_input_nodes))
    return found
