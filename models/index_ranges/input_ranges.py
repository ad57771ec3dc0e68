"""The valid range of every integer input that indexes a table, derived from the graph of a captured program.

From each place where a table is indexed (`sites.py`) back to the input (`chains.py`), through views, casts among
integers and constant offsets. Other indices are left to the guard in the engine (`engines/index_guard.py`).
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from torch.fx import GraphModule, Node

from ..errors import BadFolder
from ..spec.spec import ModelSpec, TensorSpec
from ..spec.value_range import ValueRange
from .chains import Chains, Condition, limits_of
from .sites import Site, index_sites
from .value_bounds import Bounds, intersection


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


def spec_with(spec: ModelSpec, found: Iterable[Bounds | None]) -> ModelSpec:
    """The spec with the ranges derived for its inputs. Raises BadFolder as `with_ranges` does."""
    inputs = tuple(
        tensor if bounds is None else _ranged(spec, tensor, bounds)
        for tensor, bounds in zip(spec.inputs, found, strict=True)
    )
    return replace(spec, inputs=inputs)


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


def _ranged(spec: ModelSpec, tensor: TensorSpec, bounds: Bounds) -> TensorSpec:
    if tensor.datatype == "BOOL":
        return tensor
    info = np.iinfo(tensor.type.numpy)
    derived = bounds.as_range(int(info.min), int(info.max))
    if derived is None or tensor.range is None:
        return replace(tensor, range=derived or tensor.range)
    if not tensor.range.within(derived):
        raise BadFolder(
            f"input '{tensor.name}' of '{spec.name}': model.toml says range = {tensor.range}, but the tables that it "
            f"indexes have the rows {derived}; write that, or leave range out"
        )
    return tensor
