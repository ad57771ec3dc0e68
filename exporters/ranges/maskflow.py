"""Follows mask sentinels (−1e9, −3.4e38) through a graph: from the constant through the mask to the softmax.

This is an abstract run over one graph. A tensor that may have a sentinel has a `Masked`: which sentinel, whether masked
elements are exactly the sentinel or have a score added to it, and how large the tensor's other elements get. An
operation without a rule (`maskrules.py`) ends the flow with a fault, and no sentinel connected with it is rewritten.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Graph, Node

from ...models.program import writes_into_inputs
from ..policy.classes import Trait, has
from .guards import aten_name, is_view
from .maskrules import Rules, Site
from .masks import Masked, Unknown
from .ranges import Profile


@dataclass(slots=True)
class Group:
    """Connected sentinels: rewritten together, or not at all."""

    sites: list[Site] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    sinks: list[Node] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def mask_flow(graph: Graph, prefix: str, profile: Profile) -> tuple[list[Group], Mapping[Node, Masked]]:
    """Follow every sentinel of one graph (not of its bodies), whose nodes the profile names with ``prefix``."""
    flow = _Flow(prefix, profile)
    for node in graph.nodes:
        flow.visit(node)
    return list({id(group): group for group in flow.group.values()}.values()), flow.masked


class _Flow:
    def __init__(self, prefix: str, profile: Profile) -> None:
        self.masked: dict[Node, Masked] = {}
        self.group: dict[Node, Group] = {}
        self._rules = Rules(prefix, profile, self.masked)

    def visit(self, node: Node) -> None:
        sources = [source for source in node.all_input_nodes if source in self.masked]
        try:
            state, fault = self._rules.look(node), self._rules.fault
        except Unknown as unknown:
            state, fault = None, str(unknown)
        is_sink = bool(sources) and has(aten_name(node), Trait.SOFTMAX, Trait.ATTENTION)
        if state is None and not (fault or is_sink or self._rules.sites):
            return
        group = self._join(node, sources)
        group.sites += self._rules.sites
        group.sites = [
            replace(site, role="floor") if site.node in self._rules.floors else site for site in group.sites
        ]
        group.faults += [fault] if fault else []
        if is_sink:
            group.sinks.append(node)
        if state is not None:
            self.masked[node] = state
            self._mutate(node, state, group)

    def _join(self, node: Node, sources: Iterable[Node]) -> Group:
        """The groups of all sources, and the node, become one."""
        group = Group()
        for other in {id(self.group[source]): self.group[source] for source in sources}.values():
            group.sites += other.sites
            group.nodes += other.nodes
            group.sinks += other.sinks
            group.faults += other.faults
        group.nodes.append(node)
        self.group.update(dict.fromkeys(group.nodes, group))
        return group

    def _mutate(self, node: Node, state: Masked, group: Group) -> None:
        """A mask written in place is in the tensor that it is written to as well."""
        if not writes_into_inputs(node.target):
            return
        written = node.args[0]
        if aten_name(node) == "detach_" or not isinstance(written, Node):
            return
        earlier = [user for user in written.users if user is not node and is_view(user) and user < node]
        if is_view(written) or earlier or written.op != "call_function":
            group.faults.append(f"{node.name} writes a mask into memory that has other names")
        self.masked[written] = state
        if written not in self.group:
            self.group[written] = group
            group.nodes.append(written)
