"""The steps of a captured program (`steps.py`), and its runs that show them."""

from collections.abc import Mapping, Sequence, Set
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ...models.engines.arrays import to_numpy, to_torch
from ...models.program import writes_into_inputs
from ..question import Arrays
from .choosers import compared, compared_by
from .steps import CHOOSES, Made, See, steps_behind

_READ = 3  # operands of a step, at most
_SEARCHES = {torch.ops.aten.searchsorted.Tensor, torch.ops.aten.searchsorted.Scalar}
_ROUNDED_QUOTIENTS = {torch.ops.aten.div.Tensor_mode, torch.ops.aten.div.Scalar_mode}


def find_stepped(
    module: GraphModule, outputs: Sequence[str], tied: Set[str] = frozenset()
) -> dict[str, dict[Node, str]]:
    """The steps of each output (by name, in the graph's order) that has some, but for those in ``tied``, which are
    judged by their scores."""
    (result,) = module.graph.find_nodes(op="output")
    values = zip(outputs, result.args[0], strict=True)
    asked = {name: value for name, value in values if isinstance(value, Node) and name not in tied}
    found = {name: steps_behind(value, _made) for name, value in asked.items()}
    return {name: steps for name, steps in found.items() if steps}


def _made(node: Node) -> Made[Node]:
    schema = getattr(node.target, "_schema", None)
    chooser = compared_by(node)
    op = schema.name.removeprefix("aten::") if schema else getattr(node.target, "__name__", "")
    op = CHOOSES if chooser else _rounded_quotient(node) or op
    read = (chooser or node).all_input_nodes
    inputs = (each for each in read if each.op != "get_attr" and _is_tensor(each))
    value = node.meta.get("val")
    is_whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return Made(op if node.op == "call_function" else "", tuple(inputs), is_whole)


def _rounded_quotient(node: Node) -> str:
    """The rounding of the quotient that the node gives; empty where it gives something else."""
    if node.target is torch.ops.aten.floor_divide.default:
        return "floor"
    return str(node.kwargs.get("rounding_mode") or "") if node.target in _ROUNDED_QUOTIENTS else ""


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor | tuple | list)


def run_with_steps(
    module: GraphModule,
    names: tuple[Sequence[str], Sequence[str]],
    stepped: Mapping[str, Mapping[Node, str]],
    inputs: Arrays,
    see: See[Node],
) -> None:
    """Run the program; ``see`` is shown each step. ``names``: of its inputs and of its outputs."""
    steps = {step for found in stepped.values() for step in found}

    def seen(run: Interpreter, node: Node, result: Any) -> None:
        if node not in steps:
            return

        def rest(changed: np.ndarray) -> Arrays:
            answers = rest_of_run(module, run, given(), node, to_torch(changed))
            return {name: to_numpy(answer) for name, answer in zip(names[1], answers, strict=True)}

        see(node, _operands(run, node), to_numpy(result), rest)

    def given() -> list[Tensor]:
        return [to_torch(inputs[name].copy()) for name in names[0]]

    with torch.inference_mode():
        Watched(module, seen, any(map(compared_by, steps))).run(*given())


def _operands(run: Interpreter, node: Node) -> list[np.ndarray]:
    """The operands of a step as `other_sides` takes them. A division that rounds has one operand: its quotient."""
    if chooser := compared_by(node):
        args = compared(run, chooser)
    else:
        args, kwargs = run.fetch_args_kwargs_from_env(node)
        if _rounded_quotient(node):
            args = (torch.true_divide(*args[:2]),)
        elif node.target in _SEARCHES:
            edges, numbers, sorter = *args[:2], kwargs.get("sorter")
            args = (numbers, edges if sorter is None else edges.take_along_dim(sorter, -1))
    return [np.asarray(each) for each in args[:_READ] if isinstance(each, Tensor | float | int)]


class Watched(Interpreter):
    """``seen``: is told of every result of the graph's own nodes that another node reads, but for those that are
    written into an input. ``keeps``: every result stays, such as the scores of a choice whose index is taken later."""

    def __init__(self, module: GraphModule, seen: Any, keeps: bool = False) -> None:
        super().__init__(module, garbage_collect_values=not keeps)
        self._seen = seen

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if (
            n.op == "call_function"
            and n.users
            and not writes_into_inputs(n.target)
            and isinstance(result, Tensor)
        ):
            self._seen(self, n, result)
        return result


def rest_of_run(
    module: GraphModule, run: Interpreter, inputs: Sequence[Tensor], node: Node, changed: Tensor
) -> Sequence[Tensor]:
    """The answers where ``node`` gave ``changed``. A node that writes into its input would spoil what later runs need:
    such a program runs again from the start."""
    if any(writes_into_inputs(one.target) for one in module.graph.nodes):
        return Interpreter(module).run(*inputs, initial_env={node: changed.clone()})
    before = takewhile(lambda one: one is not node, module.graph.nodes)
    known = {**dict.fromkeys(before), **run.env, node: changed}
    return Interpreter(module).run(initial_env=known)
