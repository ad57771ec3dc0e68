"""Runs the bodies of torch.export's control-flow ops: one function for dtypes, one for values.

Both functions take the op's node, its arguments, and ``run(body, prefix, operands)``, which runs a body.
Source: ``torch.cond``, ``torch.while_loop``, ``torch._higher_order_ops.scan`` and ``map``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ....models.errors import ExportFailed

RunBody = Callable[[GraphModule, str, Sequence[Any]], Sequence[Any]]


def prefixes(node: Node, prefix: str) -> list[str]:
    """The qualified names of an op's bodies, each with its dot, in the order of its arguments."""
    owner = node.graph.owning_module
    targets = [arg.target for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
    bodies = [target for target in targets if isinstance(getattr(owner, str(target), None), GraphModule)]
    return [f"{prefix}{target}." for target in bodies]


def joined(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype of a value that comes from several places: half only if it is half from everywhere."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else torch.float32


def typed(node: Node, args: Sequence[Any], prefix: str, run: RunBody) -> Any:
    """The op's result on fake tensors: branches joined, loop-carried state as wide as any iteration makes it."""
    names = prefixes(node, prefix)
    if _is(node, "cond"):
        _, one, other, operands = args
        return _join(run(one, names[0], operands), run(other, names[1], operands))
    if _is(node, "while_loop"):
        condition, body, carried, more = args
        carried = _stable(lambda state: run(body, names[1], [*state, *more]), carried)
        run(condition, names[0], [*carried, *more])
        return carried
    if _is(node, "scan"):
        body, carried, rows, more = args
        first = [row[0] for row in rows]
        state = _stable(lambda state: run(body, names[0], [*state, *first, *more])[: len(carried)], carried)
        given = run(body, names[0], [*state, *first, *more])[len(carried) :]
        return [*state, *(value.new_empty((len(rows[0]), *value.shape)) for value in given)]
    if _is(node, "map_impl"):
        body, rows, more = args
        given = run(body, names[0], [*(row[0] for row in rows), *more])
        return [value.new_empty((len(rows[0]), *value.shape)) for value in given]
    raise _unknown(node)


def ran(node: Node, args: Sequence[Any], prefix: str, run: RunBody) -> Any:
    """The op's result on real tensors."""
    names = prefixes(node, prefix)
    if _is(node, "cond"):
        condition, one, other, operands = args
        chosen, name = (one, names[0]) if bool(condition) else (other, names[1])
        return run(chosen, name, operands)
    if _is(node, "while_loop"):
        condition, body, carried, more = args
        while bool(_only(run(condition, names[0], [*carried, *more]))):
            carried = run(body, names[1], [*carried, *more])
        return carried
    if _is(node, "scan"):
        body, carried, rows, more = args
        given: list[Sequence[Tensor]] = []
        for row in zip(*rows, strict=True):
            results = run(body, names[0], [*carried, *row, *more])
            carried, out = results[: len(carried)], results[len(carried) :]
            given.append(out)
        return [*carried, *(torch.stack(values) for values in zip(*given, strict=True))]
    if _is(node, "map_impl"):
        body, rows, more = args
        given = [run(body, names[0], [*row, *more]) for row in zip(*rows, strict=True)]
        return [torch.stack(values) for values in zip(*given, strict=True)]
    raise _unknown(node)


def _only(answer: Any) -> Any:
    """The one result of a body: torch.export may give it in a list or without."""
    return answer if isinstance(answer, Tensor) else answer[0]


def _is(node: Node, name: str) -> bool:
    assert isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.target.name() == name


def _unknown(node: Node) -> ExportFailed:
    return ExportFailed(
        f"'{node.name}' ({node.target}) is a control-flow op that is not converted; use --level O0"
    )


def _join(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    return [_widened(a, b) for a, b in zip(one, other, strict=True)]


def _widened(one: Any, other: Any) -> Any:
    if not isinstance(one, Tensor) or one.dtype == other.dtype:
        return one
    return one.to(joined((one.dtype, other.dtype)))


def _stable(turn: Callable[[Sequence[Any]], Sequence[Any]], state: Sequence[Any]) -> Sequence[Any]:
    """The state's dtypes once no iteration widens them any more: each widens at most once."""
    for _ in range(len(state) + 1):
        after = _join(state, turn(state))
        if [getattr(v, "dtype", None) for v in after] == [getattr(v, "dtype", None) for v in state]:
            break
        state = after
    return state
