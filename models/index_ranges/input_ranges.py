"""The valid range of every integer input that indexes a table, derived from the graph of a captured program.

From each place where a table is indexed (`sites.py`) back to the input (`chains.py`), through views, casts among
integers and constant offsets. Other indices are left to the guard in the engine (`engines/index_guard.py`).
"""

from torch.fx import GraphModule, Node

from ..spec.spec import ModelSpec
from ..spec.value_range import ValueRange
from .chains import Chains, Condition, limits_of
from .sites import Site, index_sites
from .value_bounds import Bounds, intersection, spec_with


def with_ranges(spec: ModelSpec, module: GraphModule) -> ModelSpec:
    """The spec with the range of each integer input that indexes a table; its own ranges are kept where narrower.

    Raises BadFolder where model.toml admits values that the program's tables do not have.
    """
    found: dict[Node, Bounds] = {}
    chains = Chains(module, spec)
    for site in index_sites(module):
        condition = chains.condition(site)
        if condition is not None and condition.input is not None:
            found[condition.input] = intersection(found.get(condition.input), condition.bounds)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return spec_with(spec, [found.get(node) for node in inputs])


def unproven_sites(module: GraphModule, spec: ModelSpec | None) -> list[Site]:
    """The sites where an index may be out of range although the inputs fit ``spec`` (None: for any inputs)."""
    chains = Chains(module, spec)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    tensors = dict(zip(inputs, spec.inputs, strict=True)) if spec is not None else {}

    def is_proven(condition: Condition | None) -> bool:
        if condition is None or condition.input is None:
            return condition is not None
        tensor, limits = tensors.get(condition.input), limits_of(condition.input)
        if tensor is None or limits is None:
            return False
        return condition.bounds.admit(tensor.range or ValueRange((limits[0],), (limits[1],)))

    return [site for site in index_sites(module) if not is_proven(chains.condition(site))]
