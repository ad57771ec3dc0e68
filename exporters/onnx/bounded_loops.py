"""Answers of a file whose Loops run as long as its inputs say: what the samples never need is refused, not waited for.

A conversion asks inputs that it made itself. One of zeros may never meet the condition that ends a Loop, one of numbers
four times as large may need as many passes as a lifetime has. The bound is a count, so it is the same on every machine.
"""

from collections.abc import Iterator

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ...models.errors import NotRun
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from ..question import Answers, Arrays
from .reading.graph import ONNX, Names, bodies, names_in, opset_of
from .runtime import runtime_answers

ROOM = 64  # times as many passes as any sample needs are still made
AT_LEAST = 1000
_UNBOUNDED = np.iinfo(np.int64).max
_MIN_TAKES_INTEGERS = 12  # since this opset


def bounded_answers(model: ModelProto, spec: ModelSpec, samples: Samples) -> Answers:
    """`runtime_answers` of a file, which raise NotRun for inputs with which a Loop of the main graph makes far more
    passes than with any sample. Loops inside of other bodies are not bounded. The model is changed."""
    names, nodes, counts = Names(names_in(model.graph)), list[NodeProto](), list[str]()
    most = names.fresh("most_passes")
    for node in map(_copied, model.graph.node):
        if _is_open(node, model):
            counts.append(names.fresh(f"{most}__count"))
            nodes += _bounded(node, most, counts[-1], names)
        else:
            nodes.append(node)
    if not counts or opset_of(model) < _MIN_TAKES_INTEGERS:
        return runtime_answers(model)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.input.append(_integer(most))
    model.graph.output.extend(map(_integer, counts))
    answers, bound = runtime_answers(model), _UNBOUNDED

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        found = answers({**arrays, most: np.array(bound)})
        passes = max(int(found.pop(name)) for name in counts)
        if passes >= bound:
            raise NotRun(
                f"a Loop of '{spec.name}' makes {passes} passes or more with these inputs, more than {ROOM} times as "
                "many as with any sample"
            )
        return found

    seen = [_passes(answers, {**arrays, most: np.array(bound)}, counts) for arrays in _each(spec, samples)]
    bound = max(AT_LEAST, ROOM * max(seen, default=0))
    return answer


def has_open_loop(model: ModelProto) -> bool:
    """True for a file with a Loop in its main graph that the file itself does not bound."""
    return any(_is_open(node, model) for node in model.graph.node)


def _copied(node: NodeProto) -> NodeProto:
    return NodeProto.FromString(node.SerializeToString())


def _integer(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, [])


def _is_open(node: NodeProto, model: ModelProto) -> bool:
    """True for a Loop that the file itself does not bound."""
    if node.op_type != "Loop" or node.domain not in ONNX:
        return False
    known = [numpy_helper.to_array(one) for one in model.graph.initializer if one.name == node.input[0]]
    return not known or int(known[0].max()) > AT_LEAST


def _bounded(loop: NodeProto, most: str, count: str, names: Names) -> list[NodeProto]:
    """The Loop with at most ``most`` passes, and with the value ``count`` of how many it made."""
    (body,), own = bodies(loop).values(), loop.input[0]
    each, every = (names.fresh(f"{count}__{what}") for what in ("pass", "passes"))
    body.node.append(helper.make_node("Identity", [body.input[0].name], [each]))
    loop.output.extend([""] * (len(body.output) - 1 - len(loop.output)))
    body.output.append(_integer(each))
    loop.output.append(every)
    loop.input[0] = names.fresh(f"{count}__bound") if own else most
    before = [helper.make_node("Min", [own, most], [loop.input[0]])] if own else []
    return [*before, loop, helper.make_node("Size", [every], [count])]


def _each(spec: ModelSpec, samples: Samples) -> Iterator[Arrays]:
    """The samples in batches, as they are asked later."""
    for rows in sorted({1, spec.max_batch_size}) if spec.batched else [0]:
        yield from (arrays for _, arrays in samples.batches(min(rows, samples.count)))


def _passes(answers: Answers, arrays: Arrays, counts: list[str]) -> int:
    try:
        found = answers(arrays)
    except NotRun:  # whoever asks it next says so
        return 0
    return max(int(found[name]) for name in counts)
