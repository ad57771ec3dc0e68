"""A captured program as a side of a comparison: every tensor of its graph, and the node that makes one."""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

from ...models.archive.archive import save_program
from ...models.capture.capture import capture
from ...models.engines.arrays import to_numpy, to_torch
from ...models.engines.torch_engine import half_program, original_program
from ...models.errors import BadFolder, BadSamples, BadSetting, NotRun
from ...models.folder.package import ModelFolder
from ...models.program import runnable, writes_into_inputs
from ...models.spec.spec import ModelSpec
from ...models.store.store import Version
from ..exported.file_rows import write_npz
from ..graph.backend import GraphNode
from ..inputs.samples import as_fp32
from ..question import Arrays
from ..torch.autocast.folding import SHARED
from ..torch.program_graph import nodes_of
from .elsewhere import tensors_elsewhere
from .units import FP32, ROUNDOFF, unit_of_each


@dataclass(frozen=True)
class ProgramSide:
    """``program``: with its weights, run on a CPU; by the torch of ``python`` where it is given."""

    program: ExportedProgram
    spec: ModelSpec
    python: Path | None = None

    @cached_property
    def module(self) -> GraphModule:
        return runnable(self.program)

    @cached_property
    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.module)

    @cached_property
    def takes_others(self) -> bool:
        """True if no node writes into its input: it would write into another tensor than the nodes behind it read."""
        return not any(writes_into_inputs(node.target) for node in self.module.graph.nodes)

    @cached_property
    def inputs(self) -> dict[str, str]:
        taken = (node.name for node in self.module.graph.nodes if node.op == "placeholder")
        return dict(zip((tensor.name for tensor in self.spec.inputs), taken, strict=True))

    @cached_property
    def outputs(self) -> dict[str, str]:
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        return {t.name: str(made) for t, made in zip(self.spec.outputs, output.args[0], strict=True)}

    @cached_property
    def steps(self) -> list[tuple[str, str, frozenset[str]]]:
        """Each call that gives a tensor: its name, its operation, and the weights that it reads."""
        return [
            (node.name, op.op, frozenset(map(_weight, filter(_is_weight, node.all_input_nodes))))
            for node, op in zip(self.module.graph.nodes, _own(self.nodes), strict=True)
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
        ]

    def rows(self, arrays: Arrays, most: int) -> dict[str, np.ndarray]:
        most = min(most, self.spec.max_batch_size)
        rows: Any = slice(most) if self.spec.batched else (0, ...)
        return {
            tensor.name: as_fp32(arrays[tensor.name][rows], tensor.datatype)
            for tensor in self.spec.inputs
            if tensor.name in arrays
        }

    def tensors(self, inputs: Arrays, given: Arrays | None = None) -> dict[str, np.ndarray]:
        if missing := [name for name in self.inputs if name not in inputs]:
            raise NotRun(
                f"'{self.spec.name}' has the input '{missing[0]}', and the samples have {sorted(inputs)}"
            )
        asked = {name: inputs[name] for name in self.inputs}
        try:
            if self.python is not None:
                with TemporaryDirectory(prefix="halfeven-diff-") as place:
                    save_program(self.program, Path(place) / "program.pt2", weights=True)
                    return tensors_elsewhere(self.python, Path(place) / "program.pt2", asked)
            seen = _Seen(self.module, given or {})
            with torch.inference_mode():
                seen.run(*(to_torch(array.copy()) for array in asked.values()))
        except BadSetting:
            raise
        except Exception as error:  # kernels raise many kinds
            raise NotRun(
                f"torch does not run '{self.spec.name}' with the samples: {str(error)[:400]}"
            ) from error
        return seen.found

    def units(self, tensors: Arrays, known: Collection[str]) -> dict[str, float]:
        own = {name: ROUNDOFF.get(array.dtype.name, FP32) for name, array in tensors.items()}
        return unit_of_each(self.nodes, own, known)

    def reproduction(self, tensor: str, values: Mapping[str, np.ndarray], folder: Path) -> None:
        """Write the call that makes ``tensor`` as ``node.py``, with its inputs ``inputs.npz``. Raises BadFolder for
        an input or a weight, and for a call of control flow, which has a body."""
        node = next(each for each in self.module.graph.nodes if each.name == tensor)
        if node.op != "call_function":
            raise BadFolder(f"no node makes '{tensor}': it is an input or a weight")
        place = ""
        if node.target is operator.getitem:  # of a call that gives several tensors
            place, node = f"[{node.args[1]}]", node.args[0]
        if not isinstance(node.target, OpOverload):
            raise BadFolder(f"the node {node.target} '{tensor}' has a body, which is not written alone")
        args = [_text(arg) for arg in node.args] + [f"{key}={_text(arg)}" for key, arg in node.kwargs.items()]
        write_npz(folder / "inputs.npz", {one.name: values[one.name] for one in node.all_input_nodes})
        lines = [
            "import numpy, torch", "", 'inputs = dict(numpy.load("inputs.npz"))', "", "",
            "def read(name):", "    array = inputs[name]", "    if array.dtype.kind == 'V':  # numpy has no bfloat16",
            "        return torch.from_numpy(array.view('int16')).view(torch.bfloat16)",
            "    return torch.from_numpy(array) if array.ndim else array.item()", "", "",
            f"print(torch.ops.{node.target}({', '.join(args)}){place})", "",
        ]  # fmt: skip
        (folder / "node.py").write_text("\n".join(lines))


def captured_side(folder: ModelFolder, arrays: Arrays, python: Path | None) -> ProgramSide:
    """A model folder whose code is captured, or whose program is given. Raises BadSamples where an input is missing,
    and as `capture` does."""
    names = [tensor.name for tensor in folder.spec.inputs]
    if not arrays.keys() >= set(names):
        raise BadSamples(
            f"samples: expected the inputs {names} of '{folder.spec.name}', got {sorted(arrays)}"
        )
    taken = {one.name: as_fp32(arrays[one.name], one.datatype) for one in folder.spec.inputs}
    captured = capture(folder, taken)
    return ProgramSide(captured.program, captured.spec, python)


def stored_side(version: Version, half: bool, python: Path | None) -> ProgramSide:
    """The half or the original of a version that has programs."""
    return ProgramSide((half_program if half else original_program)(version), version.spec(), python)


def _own(nodes: Sequence[GraphNode]) -> list[GraphNode]:
    """The nodes of the graph itself, without nodes of its bodies, whose names have a dot."""
    return [node for node in nodes if "." not in node.name]


def _is_weight(node: Node) -> bool:
    return node.op == "get_attr"


def _weight(node: Node) -> str:
    """The weight's own name: a half may hold a copy in half beside it."""
    return str(node.target).removesuffix(SHARED)


def _text(value: Any) -> str:
    """An argument as Python that `reproduction` runs."""
    if isinstance(value, Node):
        return f"read({value.name!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):  # repr writes inf and nan, which Python does not know
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    return repr(value)


class _Seen(Interpreter):
    """``found``: every tensor and size by the name of its node; nodes read ``given`` in place of their own."""

    def __init__(self, module: GraphModule, given: Arrays) -> None:
        super().__init__(module)
        self.found, self._given = dict[str, np.ndarray](), given

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            kept = result.clone() if n.op == "call_function" else result.detach()
            self.found[n.name] = to_numpy(kept)
            if n.op == "call_function" and n.name in self._given:
                return to_torch(self._given[n.name].copy())
        elif isinstance(result, (bool, int, float)):
            self.found[n.name] = np.array(result)
        return result
