"""The dtype of every tensor of an original program under a plan, without computing anything.

Carried out on fake tensors, node by node. The result of a node for given dtypes is remembered, so that the next plan
takes milliseconds: the search for kept nodes asks for hundreds.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate, map_arg

from ...graph.actions import Action
from .bodies import typed
from .plan import PrecisionPlan


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of each node, by its qualified name (`models.program.walk`).

    ``out``: the dtypes of the tensors of its result, in order. ``reads``: source node → the dtype in which
    its tensor is read. ``numel``: elements of its result at the example's sizes.
    """

    half: torch.dtype
    out: dict[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    reads: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)
    numel: dict[str, int] = field(default_factory=dict)

    def is_half(self, name: str) -> bool:
        """True if a node's result is half, or some of it."""
        return self.half in self.out.get(name, ())

    def touches_half(self, name: str) -> bool:
        """True if a node reads or gives half."""
        return self.is_half(name) or self.half in self.reads.get(name, {}).values()


@dataclass(frozen=True, slots=True)
class _Step:
    """One node's result for one set of dtypes: the fake result, and the dtypes in which its sources were read."""

    result: Any
    reads: Mapping[str, torch.dtype]


class Typing:
    """Infers dtypes for one program, and remembers every step."""

    def __init__(self, module: GraphModule, example: Sequence[Tensor]) -> None:
        self._module = module
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._example = [self._mode.from_tensor(tensor, static_shapes=True) for tensor in example]
        self._steps: dict[tuple[Any, ...], _Step] = {}

    def under(self, plan: PrecisionPlan) -> Dtypes:
        found = Dtypes(plan.dtype)
        with self._mode, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Typer(self._module, plan, self._steps, found, "").run(*self._example)
        return found


class Typer(Interpreter):
    """Carries a plan out on fake tensors and notes the dtypes."""

    def __init__(
        self,
        module: GraphModule,
        plan: PrecisionPlan,
        steps: dict[tuple[Any, ...], _Step],
        found: Dtypes,
        prefix: str,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._plan, self._steps, self._found, self._prefix = plan, steps, found, prefix

    def run_node(self, n: Node) -> Any:
        name = self._prefix + n.name
        if n.op != "call_function":
            result = super().run_node(n)
            step = _Step(result, self._reads(n, None) if n.op == "output" else {})
        elif isinstance(n.target, torch._ops.HigherOrderOperator):
            step = _Step(self._control_flow(n), self._reads(n, None))
        else:
            step = self._remembered(name, n)
        tensors = list(tensors_of(step.result))
        self._found.out[name] = tuple(tensor.dtype for tensor in tensors)
        self._found.reads[name] = dict(step.reads)
        self._found.numel[name] = sum(map(_elements, tensors))
        return step.result

    def _remembered(self, name: str, node: Node) -> _Step:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        action = self._plan.actions.get(name, Action.INPUT)
        given = tuple(tensor.dtype for tensor in tensors_of((args, kwargs)))
        key = (name, action, self._plan.dtype, given)
        if key not in self._steps:
            self._steps[key] = self._step(node, action, args, kwargs)
        return self._steps[key]

    def _step(self, node: Node, action: Action, args: Any, kwargs: Any) -> _Step:
        floats = [t.dtype for t in tensors_of((args, kwargs)) if t.is_floating_point()]
        dtype = read_as(action, floats, self._plan.dtype)
        if action is Action.FP32_DTYPE:
            args, kwargs = with_dtype(node.target, args, kwargs)  # type: ignore[arg-type]
        args, kwargs = map_aggregate((args, kwargs), lambda value: cast_to(value, dtype))
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if action is Action.FP32_BACK:
            result = map_aggregate(result, lambda value: cast_to(value, self._plan.dtype))
        return _Step(result, self._reads(node, dtype))

    def _reads(self, node: Node, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        reads: dict[str, torch.dtype] = {}

        def read(source: Node) -> Node:
            value = self.env.get(source)
            if isinstance(value, Tensor):
                reads[self._prefix + source.name] = cast_to(value, dtype).dtype
            return source

        map_arg((node.args, node.kwargs), read)
        return reads

    def _control_flow(self, node: Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(node)
        return typed(node, args, self._prefix, self._body)

    def _body(self, body: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
        return Typer(body, self._plan, self._steps, self._found, prefix).run(*operands)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors of a nested structure of lists, tuples, dicts and slices, in order."""
    found: list[Tensor] = []
    map_aggregate(values, lambda value: found.append(value) if isinstance(value, Tensor) else None)
    return iter(found)


def _elements(tensor: Tensor) -> int:
    """The elements of a fake tensor. A size that values decide (``x[mask]``) is not known here: it counts as 1."""
    return prod(size if isinstance(size, int) else 1 for size in tensor.shape)


def cast_to(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value if value.dtype in (dtype, torch.float64) else value.to(dtype)


def read_as(action: Action, given: Iterable[torch.dtype], half: torch.dtype) -> torch.dtype | None:
    """The dtype in which a node reads its floating inputs (but float64); None: each in its own. The rule of each
    action, as in the autocast dispatch key: the rewrite (`rewrite.py`) asks here too, so that the two cannot differ.

    ``given``: the dtypes of its floating inputs. The widest of them is half only where all are half.
    """
    if action is Action.HALF:
        return half
    if action in (Action.FP32, Action.FP32_BACK):
        return torch.float32
    if action is Action.WIDEST:
        return half if set(given) <= {half, torch.float64} else torch.float32
    return None


def with_dtype(target: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """``dtype=float32`` where the first argument is a floating tensor and no dtype was asked for."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.dtype == torch.float64:
        return args, kwargs
    schema = [argument.name for argument in target._schema.arguments]
    given = args[schema.index("dtype")] if schema.index("dtype") < len(args) else kwargs.get("dtype")
    if given is not None:
        return args, kwargs
    return args[: schema.index("dtype")], {**kwargs, "dtype": torch.float32}
