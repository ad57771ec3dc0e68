"""The plan: an action for every op, by list and level, and the nodes kept in FP32 with their reason."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from halfeven.exporters.graph.actions import Action, Kept
from halfeven.exporters.torch.autocast.plan import PrecisionPlan, make_plan, module_path, op_name
from halfeven.models.errors import BadSetting
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.programs import original


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.second(self.first(x)), -1).exp_()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return self.norm(x)


@pytest.fixture(scope="module")
def program() -> GraphModule:
    return runnable(original(Net(), {"x": torch.randn(8, 4)}).program)


def plan(program: GraphModule, *keep: str, level: str = "O1", lists: str = "cuda") -> PrecisionPlan:
    return make_plan(program, Precision(level, keep=keep), lists)


def actions(program: GraphModule, *keep: str, level: str = "O1") -> dict[str, list[Action]]:
    """The actions of each op, in the program's order."""
    made = plan(program, *keep, level=level).actions
    found: dict[str, list[Action]] = {}
    for node in program.graph.nodes:
        if node.name in made:
            found.setdefault(op_name(node), []).append(made[node.name])
    return found


def kept(program: GraphModule, *keep: str, level: str = "O1") -> list[str]:
    return [item.node for item in plan(program, *keep, level=level).kept]


def test_at_O1_every_op_does_what_its_list_says(program: GraphModule) -> None:
    assert actions(program) == {
        "linear": [Action.HALF] * 4,
        "softmax": [Action.FP32_DTYPE] * 2,
        "exp_": [Action.INPUT] * 2,
        "add": [Action.INPUT] * 2,
        "layer_norm": [Action.FP32],
    }
    assert plan(program).fp32_by_policy == 3 and plan(program).kept == ()


def test_at_O0_nothing_is_done_and_nothing_is_kept(program: GraphModule) -> None:
    assert {action for found in actions(program, level="O0").values() for action in found} == {Action.INPUT}
    assert kept(program, "op:linear", level="O0") == []


def test_at_O2_normalisation_is_fp32_and_comes_back_in_half_and_the_rest_is_half(
    program: GraphModule,
) -> None:
    found = actions(program, level="O2")
    assert found["layer_norm"] == [Action.FP32_BACK]
    assert found["softmax"] == [Action.HALF] * 2 and found["add"] == [Action.HALF] * 2


def test_at_O3_all_is_half_but_what_changes_its_input_is_not_cast(program: GraphModule) -> None:
    found = actions(program, level="O3")
    assert found.pop("exp_") == [Action.INPUT] * 2
    assert {action for each in found.values() for action in each} == {Action.HALF}


def test_the_lists_are_those_of_the_device(program: GraphModule) -> None:
    cpu = plan(program, lists="cpu").actions
    softmax = [node.name for node in program.graph.nodes if node.name in cpu and op_name(node) == "softmax"]
    assert {cpu[name] for name in softmax} == {Action.INPUT}
    assert plan(program, lists="cpu").lists == "cpu"


def test_nodes_are_kept_by_op_by_name_and_by_module_path(program: GraphModule) -> None:
    linear = [
        node.name for node in program.graph.nodes if "linear" in node.name and node.op == "call_function"
    ]
    assert linear == ["linear", "linear_1", "linear_2", "linear_3"]
    assert kept(program, "op:linear") == kept(program, "op:lin*") == linear
    assert kept(program, "linear_2") == kept(program, "blocks.1.first") == ["linear_2"]
    assert kept(program, "blocks.1.*") == ["linear_2", "linear_3"]
    assert kept(program, "blocks.*.second") == ["linear_1", "linear_3"]
    assert kept(program, "blocks.0") == ["linear", "linear_1"]
    assert kept(program, "linear_3", "op:linear") == linear
    assert actions(program, "linear_2")["linear"] == [Action.HALF, Action.HALF, Action.FP32, Action.HALF]


def test_a_kept_node_says_who_asked_for_it_and_only_what_would_be_half_is_kept(program: GraphModule) -> None:
    made = plan(program, "blocks.1", "op:layer_norm")
    assert made.kept[0] == Kept("linear_2", "linear", "asked for by keep = 'blocks.1'", "")
    assert {item.op for item in made.kept} == {"linear"}
    assert made.fp32_by_policy == 3, "kept nodes are not among those that are FP32 by list"


def test_a_kept_node_names_the_line_of_the_models_code(program: GraphModule) -> None:
    code, _ = inspect.getsourcelines(Block.forward)
    line = Block.forward.__code__.co_firstlineno + len(code) - 1
    found = plan(program, "op:linear").with_sources(program).kept
    assert [one.source for one in found] == [f"{Path(__file__).name}:{line}"] * 4


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("op:sofmax", ["'op:sofmax'", "'softmax'"]),
        ("block.1.*", ["'block.1.*'", "'blocks.1.first'"]),
        ("linear_9", ["'linear_9'"]),
        ("", ["''"]),
    ],
)
def test_a_misspelt_pattern_is_refused_with_what_there_is(
    pattern: str, words: list[str], program: GraphModule
) -> None:
    with pytest.raises(BadSetting) as caught:
        plan(program, pattern)
    assert all(word in str(caught.value) for word in ["matches no node", "op:NAME", *words]), caught.value


def test_module_paths_are_those_of_named_modules(program: GraphModule) -> None:
    paths = {module_path(node) for node in program.graph.nodes if node.name in plan(program).actions}
    assert paths - {""} <= {name for name, _ in Net().named_modules()}
    assert {"blocks.0.first", "blocks.1.second", "norm"} <= paths


def test_a_plan_is_written_down_whole(program: GraphModule) -> None:
    written = json.loads(json.dumps(plan(program, "linear").to_json(program)))
    assert (written["level"], written["dtype"], written["keep"]) == ("O1", "fp16", ["linear"])
    assert written["lists"] == "torch.autocast, cuda"
    assert written["nodes"][0] == {
        "node": "linear", "op": "linear", "module": "blocks.0.first", "action": "fp32",
    }  # fmt: skip
    assert len(written["nodes"]) == len(plan(program).actions) and len(written["kept"]) == 1


def island(program: GraphModule, *names: str) -> GraphModule:
    """The program with nodes marked as `models.capture` marks them."""
    for node in program.graph.nodes:
        if node.name in names:
            node.meta["custom"] = {"halfeven_island": "autocast(enabled=False) at model.py:7"}
    return program


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_users_own_islands_are_fp32_at_every_level_by_policy_and_not_kept(level: str) -> None:
    program = runnable(original(Net(), {"x": torch.randn(8, 4)}).program)
    before = plan(program, level=level)
    made = plan(island(program, "linear", "add"), level=level)
    assert made.actions["linear"] is made.actions["add"] is Action.FP32
    assert made.kept == () and made.fp32_by_policy == before.fp32_by_policy + 2
    reply = {node["node"]: node for node in made.to_json(program)["nodes"]}
    assert reply["add"]["reason"] == "autocast(enabled=False) at model.py:7"
    assert "reason" not in reply["linear_1"]


def test_an_island_is_not_kept_a_second_time_and_is_nothing_at_O0() -> None:
    program = island(runnable(original(Net(), {"x": torch.randn(8, 4)}).program), "linear")
    assert kept(program, "linear", "op:linear") == ["linear_1", "linear_2", "linear_3"]
    assert plan(program, level="O0").actions["linear"] is Action.INPUT


def test_keeping_more_nodes_gives_another_plan(program: GraphModule) -> None:
    before = plan(program, "linear")
    after = before.keeping([Kept("linear_1", "linear", "found by search", "without it: error 9u")])
    assert [one.node for one in after.kept] == ["linear", "linear_1"]
    assert after.actions["linear_1"] is Action.FP32 and before.actions["linear_1"] is Action.HALF


def test_the_plan_says_that_products_accumulate_in_fp32(program: GraphModule) -> None:
    assert plan(program).to_json(program)["accumulation"] == "FP32"
