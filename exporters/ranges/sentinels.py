"""Mask sentinels that half does not have, rewritten to numbers that it has, with the same answers in FP32.

A score is masked with −1e9 or −3.4e38. In half that is −∞, or an error, and a row that is masked altogether
is NaN instead of uniform. With scores within ±16,000, as the profile shows with room to spare:

- the mask becomes LOW. Then LOW + score is representable, and the exponential of a masked score is 0 as before;
- where a score is added to it, a floor of HIGH goes under the softmax: in FP32 the sentinel absorbs the score,
  so that a row masked altogether is uniform, and behind the floor it is uniform as well;
- inside a fused attention no floor is possible: there the query of a row masked altogether becomes 0.

A mask that is pooled by its largest, clamped above HIGH or answered is LOW there, which the gate takes for a sentinel.
A case that cannot be proven (two masks added, a mask that is compared) stays and is reported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from ...models.program import walk, writes_into_inputs
from ..gate.divergence import SENTINEL
from ..graph.actions import Kept
from ..policy.classes import Trait, has
from .guards import aten_name, is_view
from .maskrules import Rules, Site
from .masks import HIGH, LOW, MAX_SCORE, SLACK, Masked, Unknown, softmax_doubt
from .ranges import Profile
from .repairs import Repair, insert

BIT_EQUAL = ": the softmax is bit-equal in FP32 on rows with no, one, some, all but one and all scores masked"
_aten = torch.ops.aten


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
    """Follows mask sentinels (−1e9, −3.4e38) through a graph: from the constant through the mask to the softmax.

    This is an abstract run over one graph. A tensor that may have a sentinel has a `Masked`: which sentinel, whether
    masked elements are exactly the sentinel or have a score added to it, and how large the tensor's other elements get.
    An operation without a rule (`maskrules.py`) ends the flow with a fault, and no sentinel connected with it is
    rewritten.
    """

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


@dataclass(frozen=True, slots=True)
class Rewritten:
    """``repairs``: the rewrites. ``keep``: ops that need FP32 because their sentinel stays."""

    repairs: tuple[Repair, ...]
    keep: tuple[Kept, ...]


def rewrite_sentinels(module: GraphModule, profile: Profile) -> Rewritten:
    """Rewrite every mask sentinel of an original program, in place, where that is proven to change no FP32 answer."""
    repairs: list[Repair] = []
    keep: list[Kept] = []
    for prefix, graph_module in _graphs(module):
        groups, masked = mask_flow(graph_module.graph, prefix, profile)
        for group in groups:
            if not group.sites and not group.faults:
                continue
            reason = _doubt(group, masked, prefix, profile)
            if reason:
                keep += _kept(group, prefix, reason)
            else:
                repairs.append(_rewrite(group, masked, prefix, profile, graph_module))
        graph_module.graph.lint()
        graph_module.recompile()
    return Rewritten(tuple(repairs), tuple(keep))


def _graphs(module: GraphModule) -> list[tuple[str, GraphModule]]:
    """The program and its control-flow bodies, each with the prefix of its nodes' names."""
    found: dict[str, GraphModule] = {}
    for name, node in walk(module):
        owner = node.graph.owning_module
        assert isinstance(owner, GraphModule)
        found[name.removesuffix(node.name)] = owner
    return list(found.items())


def _doubt(group: Group, masked: Mapping[Node, Masked], prefix: str, profile: Profile) -> str:
    """The reason why a group cannot be rewritten; empty where it can."""
    if group.faults:
        return group.faults[0]
    most = SLACK * max(masked[node].bound for node in group.nodes if node in masked)
    if most > MAX_SCORE:
        return f"scores may reach {most:.3g}, expected at most {MAX_SCORE:g}"
    for sink in group.sinks:
        state = masked[_mask_of(sink, masked)]
        try:
            bound = SLACK * _scores(sink, state, prefix, profile)
        except ValueError as error:
            return str(error)
        if doubt := softmax_doubt(state, bound, _needs_floor(sink, state), sink.name):
            return doubt
        if has(aten_name(sink), Trait.ATTENTION) and not _broadcasts(sink, masked, state):
            return f"the shape of the mask of {sink.name} is not known well enough"
    return ""


def _mask_of(sink: Node, masked: Mapping[Node, Masked]) -> Node:
    return next(source for source in sink.all_input_nodes if source in masked)


def _needs_floor(sink: Node, state: Masked) -> bool:
    return not state.exact or has(aten_name(sink), Trait.ATTENTION)


def _scores(sink: Node, state: Masked, prefix: str, profile: Profile) -> float:
    """The largest magnitude of the softmax's input beside the sentinel."""
    if not has(aten_name(sink), Trait.ATTENTION):
        return state.bound
    node = profile.nodes.get(prefix + sink.name)
    if node is None:
        raise ValueError(f"{sink.name} ran on no sample")
    return state.bound + node.scores


def _broadcasts(sink: Node, masked: Mapping[Node, Masked], state: Masked) -> bool:
    """True if a mask of rows has the query's axes, each of its size or 1."""
    mask, query = _mask_of(sink, masked).meta.get("val"), sink.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(mask, Tensor) or not isinstance(query, Tensor) or not 2 <= mask.ndim <= query.ndim:
        return False
    sizes = zip(reversed(mask.shape[:-1]), list(reversed(query.shape))[1:], strict=False)
    return state.exact and all(str(size) in ("1", str(other)) for size, other in sizes)


def _rewrite(
    group: Group, masked: Mapping[Node, Masked], prefix: str, profile: Profile, graph_module: GraphModule
) -> Repair:
    states = [masked[node] for node in group.nodes if node in masked]
    value, bounds = states[0].value, [state.bound for state in states]
    bounds += [_scores(sink, masked[_mask_of(sink, masked)], prefix, profile) for sink in group.sinks]
    most = max(bounds)
    for site in group.sites:
        _replace(site, graph_module)
    done: list[str] = []
    floors: dict[Node, Node] = {}
    for sink in group.sinks:
        mask = _mask_of(sink, masked)
        if has(aten_name(sink), Trait.ATTENTION):
            _quiet_rows(sink, mask)
            done.append(f"query 0 in rows masked altogether before {prefix}{sink.name}")
        elif not masked[mask].exact:
            if mask not in floors:
                floors[mask] = insert(_aten.clamp_min.default, (mask, HIGH), after=mask)
            sink.replace_input_with(mask, floors[mask])
            done.append(f"a floor of {HIGH:g} under {prefix}{sink.name}")
    names = ", ".join(prefix + site.node.name for site in group.sites)
    return Repair(
        node=prefix + group.sites[0].node.name,
        what="; ".join([f"mask value {value:.4g} became {LOW:g} in {names}", *dict.fromkeys(done)]),
        evidence=f"scores within ±{most:.3g} on {profile.batches} batches (±{SLACK * most:.3g} allowed for)"
        + (BIT_EQUAL if group.sinks else ""),
        kind="sentinel",
    )


def _replace(site: Site, graph_module: GraphModule) -> None:
    number = site.sign * (HIGH if site.role == "floor" else LOW)
    if site.position is not None:
        site.node.update_arg(site.position, number)
        return
    path = str(site.node.target)
    owner, _, last = path.rpartition(".")
    parent = graph_module.get_submodule(owner)
    tensor: Tensor = getattr(parent, last)
    rewritten = tensor.detach().masked_fill(tensor <= -SENTINEL, number)
    parent.register_buffer(f"{last}__{site.role}", rewritten)
    site.node.target = f"{path}__{site.role}"


def _quiet_rows(attention: Node, mask: Node) -> None:
    """All scores of a row are the mask's where the query is 0, and the row is uniform."""
    query = attention.args[0]
    assert isinstance(query, Node)
    is_masked = insert(_aten.le.Scalar, (mask, HIGH), before=attention)
    is_row = insert(_aten.all.dim, (is_masked, -1, True), before=attention)
    quiet = insert(_aten.masked_fill.Scalar, (query, is_row, 0.0), before=attention, like=query)
    attention.update_arg(0, quiet)


def _kept(group: Group, prefix: str, reason: str) -> list[Kept]:
    """The ops that hold the sentinel or read it."""
    ops = [node for node in dict.fromkeys(group.nodes) if isinstance(node.target, OpOverload)]
    return [
        Kept(prefix + node.name, aten_name(node), f"a mask value half does not have: {reason}")
        for node in ops
    ]
