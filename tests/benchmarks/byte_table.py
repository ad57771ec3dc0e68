"""Bytes and operations of BERT-base and ViT-B/16 by form and kind of node, counted from the exported programs.

    python -m tests.benchmarks.byte_table [NET …] [--rows 128] [--out FILE.json]      (needs no device)

Forms: ``fp32``, the captured original, and ``half``, by autocast's lists for CUDA, as `tests/benchmarks/gpu` runs them.
Every node is run on tensors without storage at that batch. ``each``: a node reads its tensors and writes its results
once, views excepted, as eager kernels do. ``joined``: neighbours that are no products (casts, sums, norms,
activations, copies) are one kernel, which keeps what only they read to itself: fewer bytes than a compiler reaches,
for it does not join everything. Milliseconds are those of an H100 as measured, 798 TFLOP/s and then 3.0 TB/s.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from halfeven.models.program import runnable
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.gpu.facts import Facts
from tests.benchmarks.gpu.nets import nets
from tests.benchmarks.gpu.phase import Phase

OPERATIONS, BANDWIDTH = 798e12, 3.0e12  # of an H100, a second
PRODUCTS = ("linear", "mm", "addmm", "bmm", "matmul", "conv", "attention", "einsum")
LOOKED_UP = ("embedding", "index", "gather")  # of a table only the rows that are read
KINDS = {
    "cast": ("to.dtype", "_to_copy"),
    "norm": ("norm",),
    "softmax": ("softmax",),
    "activation": ("gelu", "tanh"),
}


class Counted(Interpreter):
    """``moved``: nodes that read and write, in order. ``sizes``: bytes of each node's results. ``views``: node → the
    node whose memory its result lies in."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(runnable(program).to("meta"))
        self.moved: list[Node] = []
        self.sizes: dict[Node, int] = {}
        self.views: dict[Node, Node] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.sizes[n] = sum(one.numel() * one.element_size() for one in _tensors(result))
        if n.op == "call_function":
            memory = {one.untyped_storage()._cdata for one in _tensors(result)}
            shared = [one for one in n.all_input_nodes if memory & self._memory(one)]
            if shared:
                self.views[n] = shared[0]
            elif self.sizes[n]:
                self.moved.append(n)
        return result

    def _memory(self, node: Node) -> set[int]:
        return {one.untyped_storage()._cdata for one in _tensors(self.env[node])}

    def source(self, node: Node) -> Node:
        """The node whose memory a view reads."""
        while node in self.views:
            node = self.views[node]
        return node

    def read(self, node: Node, parent: Node) -> int:
        is_table = any(word in str(node.target) for word in LOOKED_UP) and parent.op == "get_attr"
        return self.sizes[node] if is_table else self.sizes[parent]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def kind_of(node: Node) -> str:
    name = str(node.target)
    if any(word in name for word in PRODUCTS):
        return "attention" if "attention" in name else "product"
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def each(counted: Counted) -> dict[str, int]:
    """Bytes by kind where every node is a kernel."""
    found: dict[str, int] = defaultdict(int)
    for node in counted.moved:
        found[kind_of(node)] += counted.sizes[node]
        found[kind_of(node)] += sum(counted.read(node, one) for one in node.all_input_nodes)
    return dict(found)


def joined(counted: Counted) -> int:
    """Bytes where neighbours that are no products are one kernel."""
    group: dict[Node, Node] = {node: node for node in counted.moved}
    loose = {node for node in group if kind_of(node) not in ("product", "attention")}

    def root(node: Node) -> Node:
        while group[node] is not node:
            node = group[node]
        return node

    for node in loose:
        for parent in map(counted.source, node.all_input_nodes):
            if parent in loose:
                group[root(node)] = root(parent)
    reads, total = set[tuple[Node, Node]](), 0
    written = {counted.source(one) for one in next(reversed(counted.sizes)).all_input_nodes}  # the answers
    for node in counted.moved:
        for parent in node.all_input_nodes:
            source = counted.source(parent)
            outside = source not in group or root(source) is not root(node)
            if outside and (root(node), source) not in reads:
                reads.add((root(node), source))
                total += counted.read(node, parent)
                written |= {source} & group.keys()
    return total + sum(counted.sizes[one] for one in written)


def measured(name: str, program: ExportedProgram, given: Tensor) -> dict[str, Any]:
    counted = Counted(program)
    with torch.inference_mode(), FlopCounterMode(display=False) as operations:
        counted.run(given.to("meta"))
    by_kind, total = each(counted), operations.get_total_flops()
    moved = {"each": sum(by_kind.values()), "joined": joined(counted)}
    least = {way: 1e3 * (total / OPERATIONS + size / BANDWIDTH) for way, size in moved.items()}
    return {"form": name, "gflop": total / 1e9, "by_kind": by_kind, **moved, "ms": least}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.byte_table")
    parser.add_argument("nets", nargs="*", metavar="NET", help="BERT-base or ViT-B/16")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--out", type=Path, help="results.json")
    asked = parser.parse_args()
    rows, lines = list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        phase = Phase(Facts(folder, "bytes", 0.0), torch.device("cpu"), False, False, folder, float("inf"))
        heads = [
            "net",
            "form",
            "GFLOP",
            *(f"{kind}, GB" for kind in _kinds()),
            "each, GB (ms)",
            "joined, GB (ms)",
        ]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for net in nets(phase, *asked.nets):
            given = torch.from_numpy(net.draw(1)).expand(asked.rows, *net.draw(1).shape[1:])
            for form, program in (("fp32", net.original.program), ("half", net.half)):
                rows.append({"net": net.name, **measured(form, program, given)})
                one = rows[-1]
                sizes = [f"{one['by_kind'].get(kind, 0) / 1e9:.2f}" for kind in _kinds()]
                sums = [f"{one[way] / 1e9:.1f} ({one['ms'][way]:.2f})" for way in ("each", "joined")]
                lines.append(
                    " | ".join(["| " + net.name, form, f"{one['gflop']:,.0f}", *sizes, *sums]) + " |"
                )
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1))


def _kinds() -> list[str]:
    return ["product", "attention", *KINDS, "other"]


if __name__ == "__main__":
    main()
