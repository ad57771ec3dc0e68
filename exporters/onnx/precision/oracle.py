"""Runs a graph on a CPU as a GPU with half storage would, which ONNX Runtime's CPU provider does not.

ONNX Runtime's CPU provider keeps chains of half nodes in FP32. Here every node runs by itself in FP32 (a session
of one node, which equal nodes share), and every value that the graph has in half is rounded to half, to nearest even,
before a node reads it. Bodies of If, Loop and Scan are run from here, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import onnxruntime
from onnx import GraphProto, ModelProto, NodeProto, helper

from ....models.errors import ExportFailed
from ..reading.graph import BODIES, FLOAT, HALVES, attribute, bodies, read_by
from ..reading.one_node import Key, key_of, opened, results_of
from ..reading.typing import value_types
from ..reading.widening import widen_attributes

Arrays = Mapping[str, np.ndarray]
Observe = Callable[[str, np.ndarray, int], None]  # name, value, element type in the graph
Visit = Callable[[str, Any, Callable[[np.ndarray], dict[str, np.ndarray]]], None]  # name, value, the rest

MOST_PASSES = 1 << 20  # of a Loop that nothing else bounds: one in half may never meet its condition
_HALF_TYPES = frozenset(HALVES.values())
_DROPPED_BITS: dict[int, int] = {HALVES["fp16"]: 13, HALVES["bf16"]: 16}  # of FP32's 23 bits of mantissa


def to_half_and_back(array: np.ndarray, type_: int) -> np.ndarray:
    """Rounded as half storage rounds: mantissa and range. By ONNX Runtime: NumPy takes ten times as long for FP16."""
    return np.asarray(_casts(type_).run(None, {"x": np.asarray(array, np.float32)})[0])


@cache
def _casts(type_: int) -> onnxruntime.InferenceSession:
    """A session that casts ``x`` to this type of half and back."""
    nodes = [helper.make_node("Cast", [x], [y], to=to) for x, y, to in (("x", "h", type_), ("h", "y", FLOAT))]
    x, y = (helper.make_tensor_value_info(name, FLOAT, None) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "casts", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return opened(model, 1)


def to_mantissa(array: np.ndarray, type_: int) -> np.ndarray:
    """Rounded to half's mantissa with FP32's exponent: the floor, the error that is left whatever is done about
    range."""
    drop = _DROPPED_BITS[type_]
    rounded = np.array(array, np.float32, order="C")
    bits = rounded.view(np.uint32)  # in place: a batch may be large
    to_even = bits >> np.uint32(drop)
    to_even &= np.uint32(1)
    to_even += np.uint32((1 << (drop - 1)) - 1)
    bits += to_even
    bits &= np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    np.copyto(rounded, array, where=~np.isfinite(array))
    return rounded


@dataclass(frozen=True, slots=True)
class _Step:
    """One node, ready to run: ``half`` has the type of each output that is half, 0 elsewhere."""

    node: NodeProto
    key: Key | None
    half: tuple[int, ...]
    frees: tuple[str, ...]
    bodies: Mapping[str, "_Body"]


@dataclass(frozen=True, slots=True)
class _Body:
    graph: GraphProto
    steps: tuple[_Step, ...]


class Oracle:
    """One graph, original or half. ``run`` takes and gives named arrays in the graph's own datatypes."""

    def __init__(
        self,
        model: ModelProto,
        weights: Arrays,
        rounding: Callable[[np.ndarray, int], np.ndarray] = to_half_and_back,
        observe: Observe | None = None,
        widened: dict[int, tuple[np.ndarray, np.ndarray]] | None = None,
        most_passes: int = MOST_PASSES,
    ) -> None:
        """``widened``: keeps half weights in FP32 from one oracle to the next that has the same arrays.
        ``most_passes``: of a Loop."""
        known = {} if widened is None else widened
        self.passes, self._most_passes = 0, most_passes  # the most that a Loop has made
        self._model, self._rounding, self._observe = model, rounding, observe
        self._types = value_types(model, weights)
        for name, array in weights.items():
            if id(array) not in known:
                known[id(array)] = (array, _wide(array, self._types[name]))
        self._weights = {name: known[id(array)][1] for name, array in weights.items()}
        self._main = self._body(model.graph, frees=True)

    def run(self, inputs: Arrays, visit: Visit | None = None) -> dict[str, np.ndarray]:
        """``visit`` sees every value of the main graph with the rest of the run.

        Raises ExportFailed naming the node where ONNX Runtime cannot run one, or a Loop does not end."""
        values: dict[str, Any] = dict(self._weights)
        for value in self._model.graph.input:
            values[value.name] = _wide(inputs[value.name], self._types[value.name])
            self._see(value.name, values[value.name])
        for place, step in enumerate(self._main.steps, 1):
            self._advance(step, values)
            for name in filter(None, step.node.output):
                if visit:
                    visit(name, values[name], partial(self._rest, place, values, name))
            for name in step.frees:
                values.pop(name, None)
        return self._answers(values)

    def _rest(
        self, place: int, values: Mapping[str, Any], name: str, changed: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The answers where the value ``name`` is ``changed``: the steps from ``place`` on run again."""
        again = {**values, name: changed}
        for step in self._main.steps[place:]:
            self._advance(step, again)
            for dead in step.frees:
                again.pop(dead, None)
        return self._answers(again)

    def _answers(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {
            value.name: _narrow(values[value.name], self._types[value.name])
            for value in self._model.graph.output
        }

    def _body(self, graph: GraphProto, frees: bool = False) -> _Body:
        keeps = {value.name for value in graph.output} | set(self._weights)
        last = {
            name: index for index, node in enumerate(graph.node) for name in (*node.output, *read_by(node))
        }
        dead: dict[int, list[str]] = {}
        for name, index in last.items():
            if frees and name and name not in keeps:
                dead.setdefault(index, []).append(name)
        return _Body(
            graph,
            tuple(self._step(node, tuple(dead.get(index, ()))) for index, node in enumerate(graph.node)),
        )

    def _step(self, node: NodeProto, frees: tuple[str, ...]) -> _Step:
        half = tuple(type_ if type_ in _HALF_TYPES else 0 for type_ in map(self._type, node.output))
        if node.op_type in BODIES and bodies(node):
            return _Step(node, None, half, frees, {k: self._body(g) for k, g in bodies(node).items()})
        wide = NodeProto()
        wide.CopyFrom(node)
        widen_attributes(wide)
        types = [FLOAT if type_ in _HALF_TYPES else type_ for type_ in map(self._type, node.input)]
        key = key_of(wide, types, self._model.opset_import, self._model.ir_version)
        return _Step(node, key, half, frees, {})

    def _type(self, name: str) -> int:
        return self._types.get(name, 0)

    def _see(self, name: str, value: Any) -> None:
        if self._observe is not None and name and isinstance(value, np.ndarray):
            self._observe(name, value, self._type(name))

    def _run(self, body: _Body, values: dict[str, Any]) -> list[Any]:
        for step in body.steps:
            self._advance(step, values)
        return [values[value.name] for value in body.graph.output]

    def _advance(self, step: _Step, values: dict[str, Any]) -> None:
        results = self._plain(step, values) if step.key else self._control(step, values)
        for name, value, half in zip(step.node.output, results, step.half, strict=False):
            if name:
                values[name] = self._rounding(value, half) if half and step.key else value
                self._see(name, values[name])

    def _plain(self, step: _Step, values: Mapping[str, Any]) -> list[Any]:
        assert step.key is not None
        feed = {f"i{slot}": values[name] for slot, name in enumerate(step.node.input) if name}
        try:
            found = iter(results_of(step.key, feed))
        except Exception as error:
            raise ExportFailed(
                f"ONNX Runtime cannot run node '{step.node.name}' ({step.node.op_type}): {str(error)[:300]}"
            ) from error
        return [np.asarray(next(found)) if name else None for name in step.node.output]

    def _control(self, step: _Step, values: dict[str, Any]) -> list[Any]:
        return {"If": self._if, "Loop": self._loop, "Scan": self._scan}[step.node.op_type](step, values)

    def _if(self, step: _Step, values: dict[str, Any]) -> list[Any]:
        taken = (
            "then_branch" if bool(np.asarray(values[step.node.input[0]]).reshape(-1)[0]) else "else_branch"
        )
        return self._run(step.bodies[taken], values)

    def _loop(self, step: _Step, values: dict[str, Any]) -> list[Any]:
        """ONNX Loop: trip count and condition may be absent; scan outputs are stacked."""
        limit, going, *state = [values[name] if name else None for name in step.node.input]
        body = step.bodies["body"]
        most = None if limit is None else int(np.asarray(limit).reshape(-1)[0])
        goes_on = True if going is None else bool(np.asarray(going).reshape(-1)[0])
        stacked: list[list[np.ndarray]] = [[] for _ in body.graph.output[1 + len(state) :]]
        trip = 0
        while goes_on and (most is None or trip < most):
            if trip >= self._most_passes:
                raise ExportFailed(
                    f"node '{step.node.name}' (Loop) makes more than {trip} passes with these inputs: expected far "
                    "fewer, as with the samples; keep what its condition is computed from in FP32 (keep in model.toml)"
                )
            arguments = [np.asarray(trip, np.int64), np.asarray(goes_on), *state]
            results = self._enter(body, arguments, values)
            goes_on = bool(np.asarray(results[0]).reshape(-1)[0])
            state = results[1 : 1 + len(state)]
            for column, value in zip(stacked, results[1 + len(state) :], strict=True):
                column.append(value)
            trip += 1
        self.passes = max(self.passes, trip)
        scanned = zip(stacked, body.graph.output[1 + len(state) :], strict=True)
        return [*state, *(self._stack(column, 0, value.name, value) for column, value in scanned)]

    def _scan(self, step: _Step, values: dict[str, Any]) -> list[Any]:
        """ONNX Scan (opset 9 on): scan inputs are cut along their axes, scan outputs stacked along theirs."""
        node, body = step.node, step.bodies["body"]
        count = _integer(node, "num_scan_inputs")
        inputs = [values[name] for name in node.input]
        state, scanned = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
        axes, backwards = (
            _integers(node, "scan_input_axes", count),
            _integers(node, "scan_input_directions", count),
        )
        stacked: list[list[np.ndarray]] = [[] for _ in body.graph.output[len(state) :]]
        length = scanned[0].shape[axes[0]]
        for trip in range(length):
            cut = [
                np.take(array, length - 1 - trip if back else trip, axis=axis)
                for array, axis, back in zip(scanned, axes, backwards, strict=True)
            ]
            results = self._enter(body, [*state, *cut], values)
            state, rows = results[: len(state)], results[len(state) :]
            for column, value in zip(stacked, rows, strict=True):
                column.append(value)
        axes_out = _integers(node, "scan_output_axes", len(stacked))
        turned = _integers(node, "scan_output_directions", len(stacked))
        declared = body.graph.output[len(state) :]
        return [
            *state,
            *(
                self._stack(column[::-1] if back else column, axis, value.name, value)
                for column, axis, back, value in zip(stacked, axes_out, turned, declared, strict=True)
            ),
        ]

    def _enter(self, body: _Body, arguments: Sequence[Any], values: dict[str, Any]) -> list[Any]:
        for value, argument in zip(body.graph.input, arguments, strict=True):
            values[value.name] = argument
            self._see(value.name, argument)
        return self._run(body, values)

    def _stack(self, column: list[np.ndarray], axis: int, name: str, declared: Any) -> np.ndarray:
        if column:
            return np.ascontiguousarray(np.stack(column, axis))
        shape = [dim.dim_value for dim in declared.type.tensor_type.shape.dim]
        shape.insert(axis, 0)
        type_ = FLOAT if self._types[name] in _HALF_TYPES else self._types[name]
        return np.zeros(shape, helper.tensor_dtype_to_np_dtype(type_))


def _integer(node: NodeProto, name: str) -> int:
    value = attribute(node, name)
    assert isinstance(value, int)
    return value


def _integers(node: NodeProto, name: str, count: int) -> Sequence[int]:
    value = attribute(node, name)
    return [int(item) for item in value] if isinstance(value, list) else [0] * count


def _wide(array: np.ndarray, type_: int) -> np.ndarray:
    return (
        array.astype(np.float32) if type_ in _HALF_TYPES else np.ascontiguousarray(array).reshape(array.shape)
    )


def _narrow(array: np.ndarray, type_: int) -> np.ndarray:
    if type_ not in _HALF_TYPES:
        return array
    with np.errstate(over="ignore"):  # the gate sees the infinities
        return array.astype(helper.tensor_dtype_to_np_dtype(type_))
