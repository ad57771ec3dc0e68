"""Indices that a program computes are checked against their table while it runs: none out of range reaches a device.

On a CUDA device an index out of range is a device-side assert, after which every later call fails (`faults.py`). So
an index that is not proven to be in range (`index_ranges`) is clamped, which changes no valid index, and a flag whether
any was clamped is one more output. A batch with such an index raises BadRequest, and its requests are run again in
parts, as after any failure: the other requests get the answers that they would have got alone.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..errors import BadRequest
from ..index_ranges.input_ranges import unproven_sites
from ..index_ranges.sites import Site
from ..program import source_line
from ..spec.spec import Dim, ModelSpec
from .engine import InBackground

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Guard:
    """``tables`` are named for a message, in the order of the flags in the program's last output."""

    tables: tuple[str, ...]

    def checked(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs without the flags. Raises BadRequest naming the first table whose range was exceeded."""
        *answers, flags = outputs
        if flags.any():
            missed = [table for table, flag in zip(self.tables, flags.tolist(), strict=True) if flag]
            raise BadRequest(
                f"the values of the inputs lead the model to an index that is out of range for {missed[0]}; send "
                "values like those that the model was made for"
            )
        return answers

    def around(self, program: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
        """The program with its check; where outputs are still on their way, `GuardedLaunch` checks them."""
        return lambda *inputs: self.checked(program(*inputs))


@dataclass(slots=True, eq=False)
class GuardedLaunch:
    """A batch under way on a device, whose flags are checked when it is waited for."""

    launched: InBackground
    guard: Guard

    def synchronize(self) -> None:
        """Block until the outputs and the flags are here. Raises what the run raised."""
        self.launched.synchronize()

    def wait(self) -> list[np.ndarray]:
        """The outputs without the flags. Raises BadRequest, and what the run raised."""
        return self.guard.checked(self.launched.wait())


def guard_indices(module: GraphModule, spec: ModelSpec | None) -> Guard | None:
    """Change the module so that no index is out of range; None, and no change, where every index is proven.

    ``spec``: its sizes and ranges are taken to hold for every batch, where a batch outside of them does no harm; None:
    any values may come.
    """
    sites = unproven_sites(module, spec)
    if not sites:
        return None
    writing = _Writing(module.graph)
    flags = [writing.guard(site) for site in sites]
    output = next(node for node in module.graph.nodes if node.op == "output")
    with module.graph.inserting_before(output):
        flat = module.graph.call_function(_aten.stack.default, (flags,))
    output.args = ((*output.args[0], flat),)  # type: ignore[misc]
    module.graph.lint()
    module.recompile()
    return Guard(tuple(_named(site) for site in sites))


def rows_alone(spec: ModelSpec | None) -> ModelSpec | None:
    """The part of the spec that holds for requests checked against another version's: all inputs have equal rows."""
    if spec is None:
        return None
    inputs = (replace(t, range=None, shape=tuple(Dim(0) for _ in t.shape)) for t in spec.inputs)
    return replace(spec, inputs=tuple(inputs))


class _Writing:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.done: dict[
            tuple[Any, ...], tuple[Node, Node]
        ] = {}  # one check where a table is indexed twice alike

    def guard(self, site: Site) -> Node:
        """Clamp the site's index; gives the node whose value is whether that changed anything."""
        key = (
            site.index,
            site.negatives,
            site.size if isinstance(site.size, int) else (site.table, site.axis),
        )
        if key not in self.done:
            with self.graph.inserting_before(site.node):
                self.done[key] = self.clamped(site)
        clamped, flag = self.done[key]
        args = list(site.node.args)
        if len(site.place) == 1:
            args[site.place[0]] = clamped
        else:
            listed = list(args[site.place[0]])  # type: ignore[arg-type]
            listed[site.place[1]] = clamped
            args[site.place[0]] = listed
        site.node.args = tuple(args)
        return flag

    def clamped(self, site: Site) -> tuple[Node, Node]:
        size = self.size(site)
        last = size - 1 if isinstance(size, int) else self.call(operator.sub, size, 1)
        least: Any = 0
        if site.negatives:
            least = -size if isinstance(size, int) else self.call(operator.sub, 0, size)
        clamped = self.call(_aten.clamp.default, site.index, least, last)
        clamped.meta = dict(site.index.meta)
        return clamped, self.call(_aten.any.default, self.call(_aten.ne.Tensor, site.index, clamped))

    def size(self, site: Site) -> int | Node:
        if isinstance(site.size, int):
            return site.size
        if site.axis is None:
            return self.call(_aten.sym_numel.default, site.table)
        return self.call(_aten.sym_size.int, site.table, site.axis)

    def call(self, target: Any, *arguments: Any) -> Node:
        return self.graph.call_function(target, arguments)


def _named(site: Site) -> str:
    size = f" of {site.size} rows" if isinstance(site.size, int) else ""
    return f"the table{size} that '{site.node.name}' indexes{source_line(site.node)}"
