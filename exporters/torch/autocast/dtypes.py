"""The dtype of every tensor of an original program under a plan, without computing anything; the dtype in which each
node reads its inputs, operands of loops and branches too.

Carried out on fake tensors, node by node. The result of a node for given dtypes is remembered, so that the next plan
takes milliseconds: the search for kept nodes asks for hundreds.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate, map_arg

from ....models.program import reads_sizes
from ...graph.actions import Action
from .bodies import prefixes, typed
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
        with self._mode, sizes_unknown(self._module), torch.no_grad(), warnings.catch_warnings():
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
        self._found.numel[name] = sum(map(elements, tensors))
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


def sizes_unknown(module: GraphModule) -> AbstractContextManager[None]:
    """A context for a run on fake tensors. A size that comes from numbers is not known there, and torch's compiled
    decompositions need its value: torch's decompositions in Python, which do not, take their place."""
    return enable_python_dispatcher() if reads_sizes(module) else nullcontext()


def elements(tensor: Tensor) -> int:
    """The elements of a fake tensor. A size that values decide (``x[mask]``) is not known here: it counts as 1."""
    return prod(size if isinstance(size, int) else 1 for size in tensor.shape)


def cast_to(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value if value.dtype in (dtype, torch.float64) else value.to(dtype)


def read_as(action: Action, given: Iterable[torch.dtype], half: torch.dtype) -> torch.dtype | None:
    """The dtype in which a node reads its floating inputs (but float64); None: each in its own. The rule of each
    action, as in the autocast dispatch key: the rewrite (`rewrite.py`) asks here too, so that the two cannot differ.

    ``given``: the dtypes of its floating inputs, in their order. The widest of them is half only where all are half.
    """
    if action is Action.HALF:
        return half
    if action in (Action.FP32, Action.FP32_BACK):
        return torch.float32
    if action is Action.FIRST:
        return next(iter(given), None)
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """Positions among an op's arguments: captured operands, what bodies get before them, loop-carried state."""

    captured: int
    before: tuple[int, ...] = ()
    state: int | None = None


_LAYOUTS: Mapping[str, _Layout] = {
    "cond": _Layout(3),
    "while_loop": _Layout(3, before=(2,), state=2),
    "scan": _Layout(3, before=(1, 2), state=1),
    "map_impl": _Layout(2, before=(1,)),
}


def is_control_flow(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in _LAYOUTS


def captured_at(node: Node) -> int:
    return _layout(node).captured


def state_at(node: Node) -> int | None:
    return _layout(node).state


@dataclass(frozen=True, slots=True)
class CapturedOperand:
    """An operand of a control-flow op's bodies: the dtypes in which they read it, its own first.

    A weight is captured as an operand. Cast inside the body it would be cast at every iteration of a loop and could not
    be folded; so the cast is done once, before the op, and the operand is handed over in half, in FP32, in both (as two
    operands), or, where no body reads it, not at all.
    """

    operand: Any
    dtypes: tuple[torch.dtype, ...]

    @property
    def count(self) -> int:
        """The number of operands of the call that stand for this captured operand."""
        return len(self.dtypes) if isinstance(self.operand, Tensor) else 1

    def versions(self, cast: Callable[[Tensor, torch.dtype], Tensor]) -> list[Any]:
        if not isinstance(self.operand, Tensor):
            return [self.operand]
        return [cast(self.operand, dtype) for dtype in self.dtypes]


def captured(node: Node, args: Sequence[Any], prefix: str, dtypes: Dtypes) -> list[CapturedOperand]:
    """The captured operands of a control-flow op, with the dtypes in which its bodies read them."""
    layout, found = _layout(node), []
    first = sum(len(args[i]) for i in layout.before)
    for index, operand in enumerate(args[layout.captured]):
        wanted = set[torch.dtype]()
        for body, name in _bodies(node, prefix):
            wanted |= read_in(_placeholder(body, first + index), name, dtypes)
        own = getattr(operand, "dtype", None)
        found.append(
            CapturedOperand(operand, tuple(sorted(wanted, key=lambda dtype: (dtype != own, str(dtype)))))
        )
    return found


def unpacked(given: Sequence[CapturedOperand], flat: Sequence[Any]) -> Iterator[list[Any]]:
    """The versions of each captured operand among the arguments of a body."""
    rest = iter(flat)
    for one in given:
        yield [next(rest) for _ in range(one.count)]


def read_in(source: Node, prefix: str, dtypes: Dtypes) -> set[torch.dtype]:
    """The dtypes in which a value is read by the nodes of its graph, and by those of their bodies."""
    return {dtype for _, dtype in readers(source, prefix, dtypes)}


def readers(source: Node, prefix: str, dtypes: Dtypes) -> Iterator[tuple[str, torch.dtype]]:
    """The nodes that read a value, by qualified name, each with the dtype; those of bodies that capture it too."""
    for user in source.users:
        name = prefix + user.name
        if not is_control_flow(user):
            yield name, dtypes.reads[name][prefix + source.name]
            continue
        layout = _layout(user)
        if any(source is arg for i in (0, *layout.before) for arg in _sequence(user.args[i])):
            yield name, dtypes.reads[name][prefix + source.name]
        first = sum(len(_sequence(user.args[i])) for i in layout.before)
        for index, operand in enumerate(_sequence(user.args[layout.captured])):
            if operand is source:
                for body, inner in _bodies(user, prefix):
                    yield from readers(_placeholder(body, first + index), inner, dtypes)


def _layout(node: Node) -> _Layout:
    assert isinstance(node.target, HigherOrderOperator)
    return _LAYOUTS[node.target.name()]


def _bodies(node: Node, prefix: str) -> list[tuple[GraphModule, str]]:
    owner, names = node.graph.owning_module, prefixes(node, prefix)
    return [(getattr(owner, name.removeprefix(prefix).removesuffix(".")), name) for name in names]


def _placeholder(body: GraphModule, index: int) -> Node:
    return [node for node in body.graph.nodes if node.op == "placeholder"][index]


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def numbers(node: Node) -> list[float]:
    """The operands of a node that are numbers in the code. An exported file has them as tensors."""
    if not isinstance(node.target, OpOverload):
        return []
    found = []
    for position, argument in enumerate(node.target._schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        is_operand = any(word in str(argument.type) for word in ("Tensor", "number"))
        if is_operand and isinstance(value, int | float) and not isinstance(value, bool):
            found.append(float(value))
    return found
