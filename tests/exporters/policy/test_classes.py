"""One table of operation classes: every name is an operation, has one class, and means the same for both back ends."""

import re
from collections import Counter
from pathlib import Path

import onnx
import onnx.parser
import pytest
import torch
from halfeven.exporters.graph.actions import Action
from halfeven.exporters.onnx.precision.op_lists import Rule as OnnxRule
from halfeven.exporters.onnx.precision.op_lists import rules
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.exporters.policy.classes import CLASSES, OpClass, Rule, Trait, class_of, has
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.policy import CUDA
from halfeven.models.folder.package import Precision
from onnxruntime.capi import onnxruntime_pybind11_state as runtime  # type: ignore[attr-defined]

LEVELS = ("O1", "O2", "O3")
# The rules of a file's node that do the same as each action of a captured program's node.
SAME = {
    Action.HALF: {OnnxRule.HALF, OnnxRule.HALF_IF_FED},
    Action.FP32: {OnnxRule.FP32},
    Action.FP32_DTYPE: {OnnxRule.FP32},
    Action.FP32_BACK: {OnnxRule.FP32_BACK},
    Action.WIDEST: {OnnxRule.FOLLOW},
    Action.INPUT: {OnnxRule.FOLLOW},
}
BOTH = [found for found in CLASSES if found.aten and found.onnx and Trait.SEES_SIZES not in found.traits]
# Names of other operations in ONNX than in torch: a picture's size, any scatter, a sum of several tensors.
OTHER_MEANING = {"Resize", "Scatter", "Sum"}
every_class = pytest.mark.parametrize("found", BOTH, ids=lambda found: found.name)
every_level = pytest.mark.parametrize("level", LEVELS)


def precision(level: str) -> Precision:
    return Precision(level=level)


def planned(name: str, level: str) -> Action:
    """The action for one call of an ATen operation."""
    packet, _, which = name.partition(".")
    op = getattr(torch.ops.aten, packet)
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    overload = getattr(op, which or op.overloads()[0])
    graph.output(graph.call_function(overload, (source,)))
    plan = make_plan(torch.fx.GraphModule({}, graph), precision(level))
    return next(iter(plan.actions.values()))


def ruled(op: str, level: str) -> OnnxRule:
    """The rule for one node of an ONNX file; rules read no inputs but an embedding's."""
    program = normalise(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
        ),
        Path("one.onnx"),
    )
    (node,) = program.graph.node
    node.op_type = op
    return rules(program, precision(level))[node.name]


def test_no_name_is_in_two_classes() -> None:
    entries = Counter(name for found in CLASSES for name in (*found.aten, *found.onnx))
    classes = Counter(
        plain
        for found in CLASSES
        for plain in {name.partition(".")[0] for name in (*found.aten, *found.onnx)}
    )
    assert [name for name, times in (entries + classes).items() if times > 2] == []
    assert len({found.name for found in CLASSES}) == len(CLASSES)


def test_every_onnx_name_is_an_operator_of_onnx_or_of_onnx_runtime() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    known |= {schema.name for schema in runtime.get_all_operator_schema() if schema.domain == "com.microsoft"}
    assert [name for found in CLASSES for name in found.onnx if name not in known] == []


def test_every_aten_name_is_an_operation_of_torch() -> None:
    known = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        known |= {name, f"{name}.{schema.overload_name}"}
    assert [name for found in CLASSES for name in found.aten if name not in known] == []


@every_level
@every_class
def test_both_back_ends_give_a_class_the_same_rule(found: OpClass, level: str) -> None:
    if Trait.RECURRENT in found.traits and level != "O1":
        return  # kept for want of a kernel: tests/exporters/onnx/test_foreign_plan.py
    actions = {planned(name, level) for name in found.aten}
    (action,) = actions
    assert {ruled(name, level) for name in found.onnx} <= SAME[action]


def test_a_rule_of_an_onnx_operator_is_that_of_its_namesake_in_torch() -> None:
    """A module and its own file would differ otherwise, as torch's exporter writes the one as the other."""
    faults = []
    for name in {onnx_name for found in CLASSES for onnx_name in found.onnx} - OTHER_MEANING:
        for namesake in {name.lower(), re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()}:
            ruled_apart = class_of(name).o1 not in (class_of(namesake).o1, Rule.LEFT_ALONE)
            faults += [name] if ruled_apart and hasattr(torch.ops.aten, namesake) else []
    assert faults == []


def test_what_no_class_has_follows_its_inputs() -> None:
    assert class_of("Sigmoid").o1 is class_of("sigmoid").o1 is Rule.INPUT
    assert CUDA.rule(torch.ops.aten.sigmoid.default) is Rule.INPUT
    assert has("add_", Trait.ADDS) and has("_softmax", Trait.SOFTMAX) and not has("mul", Trait.ADDS)
