"""The plan: an action for every op, by list and level, and the nodes kept in FP32 with their reason."""

import json

import pytest
import torch
from halfeven.exporters.plan import Action, Kept, PrecisionPlan, make_plan, module_path, op_name
from halfeven.models.errors import BadSetting
from halfeven.models.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch.fx import Graph

from tests.nets import NETS
from tests.programs import whole


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
def graph() -> Graph:
    return runnable(whole(Net(), {"x": torch.randn(8, 4)}).program).graph


def plan(graph: Graph, *keep: str, level: str = "O1", lists: str = "cuda") -> PrecisionPlan:
    return make_plan(graph, Precision(level, keep=keep), lists)


def actions(graph: Graph, *keep: str, level: str = "O1") -> dict[str, list[Action]]:
    """What each op does, in the graph's order."""
    made = plan(graph, *keep, level=level).actions
    found: dict[str, list[Action]] = {}
    for node in graph.nodes:
        if node.name in made:
            found.setdefault(op_name(node), []).append(made[node.name])
    return found


def kept(graph: Graph, *keep: str, level: str = "O1") -> list[str]:
    return [item.node for item in plan(graph, *keep, level=level).kept]


def test_at_O1_every_op_does_what_its_list_says(graph: Graph) -> None:
    assert actions(graph) == {
        "linear": [Action.HALF] * 4,
        "softmax": [Action.FP32_DTYPE] * 2,
        "exp_": [Action.INPUT] * 2,
        "add": [Action.INPUT] * 2,
        "layer_norm": [Action.FP32],
    }
    assert plan(graph).fp32_by_policy == 3 and plan(graph).kept == ()


def test_at_O0_nothing_is_done_and_nothing_is_kept(graph: Graph) -> None:
    assert {action for found in actions(graph, level="O0").values() for action in found} == {Action.INPUT}
    assert kept(graph, "op:linear", level="O0") == []


def test_at_O2_normalisation_is_fp32_and_comes_back_in_half_and_the_rest_is_half(graph: Graph) -> None:
    found = actions(graph, level="O2")
    assert found["layer_norm"] == [Action.FP32_BACK]
    assert found["softmax"] == [Action.HALF] * 2 and found["add"] == [Action.HALF] * 2


def test_at_O3_all_is_half_but_what_changes_its_input_is_not_cast(graph: Graph) -> None:
    found = actions(graph, level="O3")
    assert found.pop("exp_") == [Action.INPUT] * 2
    assert {action for each in found.values() for action in each} == {Action.HALF}


def test_the_lists_are_those_of_the_device(graph: Graph) -> None:
    cpu = plan(graph, lists="cpu").actions
    softmax = [node.name for node in graph.nodes if node.name in cpu and op_name(node) == "softmax"]
    assert {cpu[name] for name in softmax} == {Action.INPUT}
    assert plan(graph, lists="cpu").lists == "cpu"


def test_nodes_are_kept_by_op_by_name_and_by_module_path(graph: Graph) -> None:
    linear = [node.name for node in graph.nodes if "linear" in node.name and node.op == "call_function"]
    assert linear == ["linear", "linear_1", "linear_2", "linear_3"]
    assert kept(graph, "op:linear") == kept(graph, "op:lin*") == linear
    assert kept(graph, "linear_2") == kept(graph, "blocks.1.first") == ["linear_2"]
    assert kept(graph, "blocks.1.*") == ["linear_2", "linear_3"]
    assert kept(graph, "blocks.*.second") == ["linear_1", "linear_3"]
    assert kept(graph, "blocks.0") == ["linear", "linear_1"]
    assert kept(graph, "linear_3", "op:linear") == linear
    assert actions(graph, "linear_2")["linear"] == [Action.HALF, Action.HALF, Action.FP32, Action.HALF]


def test_a_kept_node_says_who_asked_for_it_and_only_what_would_be_half_is_kept(graph: Graph) -> None:
    made = plan(graph, "blocks.1", "op:layer_norm")
    assert made.kept[0] == Kept("linear_2", "linear", "asked for by keep = 'blocks.1'", "")
    assert {item.op for item in made.kept} == {"linear"}
    assert made.fp32_by_policy == 3, "kept nodes are not among those that are FP32 by list"


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
    pattern: str, words: list[str], graph: Graph
) -> None:
    with pytest.raises(BadSetting) as caught:
        plan(graph, pattern)
    assert all(word in str(caught.value) for word in ["matches no node", "op:NAME", *words]), caught.value


def test_module_paths_are_those_of_named_modules(graph: Graph) -> None:
    paths = {module_path(node) for node in graph.nodes if node.name in plan(graph).actions}
    assert paths - {""} <= {name for name, _ in Net().named_modules()}
    assert {"blocks.0.first", "blocks.1.second", "norm"} <= paths


def test_a_plan_is_written_down_whole(graph: Graph) -> None:
    written = json.loads(json.dumps(plan(graph, "linear").to_json(graph)))
    assert (written["level"], written["dtype"], written["keep"]) == ("O1", "fp16", ["linear"])
    assert written["lists"] == "torch.autocast, cuda"
    assert written["nodes"][0] == {
        "node": "linear", "op": "linear", "module": "blocks.0.first", "action": "fp32",
    }  # fmt: skip
    assert len(written["nodes"]) == len(plan(graph).actions) and len(written["kept"]) == 1


def test_embeddings_follow_their_own_word() -> None:
    encoder = runnable(whole(NETS["encoder"].build(), NETS["encoder"].inputs(8)).program).graph
    for word, action in (("keep", Action.INPUT), ("half", Action.HALF)):
        made = make_plan(encoder, Precision(embeddings=word))
        assert [made.actions[n.name] for n in encoder.nodes if n.name.startswith("embedding")] == [action]
