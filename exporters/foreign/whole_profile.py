"""The profile of an ONNX graph in the terms of captured programs: what every node's result held on real samples."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..ranges.profile import NodeProfile, Profile
from ..ranges.ranges import Limits, Tally
from .graph import FLOAT, ForeignProgram, read_by
from .oracle import Oracle


def whole_profile(
    program: ForeignProgram, batches: Iterable[Mapping[str, np.ndarray]], half: torch.dtype
) -> Profile:
    """Inputs and constants of the graph stand under their own names, as placeholders and attributes."""
    tallies: dict[str, Tally] = {}

    def see(name: str, array: Any, type_: int) -> None:
        if type_ == FLOAT:
            fresh = torch.from_numpy(np.array(array, np.float32))
            tallies.setdefault(name, Tally(Limits.of(half))).add(fresh)

    for name, array in program.weights.items():
        if program.is_float(name):
            see(name, array, FLOAT)
    count, oracle = 0, Oracle(program.model, program.weights, observe=see)
    for inputs in batches:
        count += 1
        oracle.run(inputs)
    return Profile(half, count, _nodes(program, tallies))


def _nodes(program: ForeignProgram, tallies: Mapping[str, Tally]) -> dict[str, NodeProfile]:
    makers = {output: node.name for node in program.nodes for output in node.output}
    leaves = {name: "get_attr" if name in program.weights else "placeholder" for name in tallies}
    found = {
        name: NodeProfile(name, op, (), tallies[name].range())
        for name, op in leaves.items()
        if name not in makers
    }
    for node in program.nodes:
        given = next((name for name in node.output if name in tallies and tallies[name].seen), None)
        if given is not None:
            reads = [makers.get(name, name) for name in sorted(read_by(node))]
            known = tuple(name for name in dict.fromkeys(reads) if name in found)
            found[node.name] = NodeProfile(node.name, node.op_type, known, tallies[given].range())
    return found
