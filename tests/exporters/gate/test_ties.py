"""Claims about indices that may differ because their scores tie, and those that may not: of programs and of files."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from halfeven.exporters.gate.choosers import choices, find_tied
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge
from halfeven.exporters.gate.ties import Ties
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.onnx.precision.ties import FileChoices
from halfeven.exporters.onnx.precision.ties import find_tied as tied_of_file
from halfeven.exporters.onnx.runtime import runtime_answers
from halfeven.models.program import runnable
from onnx import ModelProto
from torch import Tensor, nn

from tests.exporters.onnx.onnx_files import parsed
from tests.programs import Original, original

U = UNIT_ROUNDOFF["fp16"]
ROWS, WIDTH = 6, 7


class Net(nn.Module):
    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(x * 1.0)


def scores(rows: int = ROWS, *inner: int) -> Tensor:
    """Scores that are well apart: a permutation of 1, 2, … in every line, so that S is the width."""
    shape = inner or (WIDTH,)
    return (torch.rand(rows, *shape).argsort(-1) + 1).float()


def captured(choose: Callable[[Tensor], Tensor], x: Tensor) -> Original:
    return original(Net(choose), {"x": x})


def ties_of(found: Original, *inputs: Tensor) -> Ties:
    judging = [{"x": x.numpy()} for x in inputs]
    return ties_with(found, lambda: judging)


def ties_with(found: Original, judging: Callable[[], Iterable[Mapping[str, np.ndarray]]]) -> Ties:
    module = runnable(found.program)
    tied = find_tied(module, [output.name for output in found.spec.outputs])
    return Ties([one.output for one in tied], lambda asked: choices(module, tied, [asked["x"]]), U, judging)


def tolerated(choose: Callable[[Tensor], Tensor], x: Tensor, near: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Two masks: the places where the answer to ``near`` may stand for the answer to ``x``, and those where it is
    another."""
    found = captured(choose, x)
    (reference,), (candidate,) = found.run(x), found.run(near)
    tied = ties_of(found, x).tolerated({"x": x.numpy()}, {"y0": reference.numpy()}, {"y0": candidate.numpy()})
    different = (reference != candidate).numpy()
    return tied.get("y0", np.zeros_like(different)), different


K2 = " k = Constant<value_ints=[2]>() v, i = TopK<axis=1>(a, k)"
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: x.argmax(-1),
    "argmax kept": lambda x: x.argmax(-1, keepdim=True),
    "argmin": lambda x: (-x).argmin(-1),
    "max": lambda x: x.max(-1).indices,
    "topk": lambda x: x.topk(3, -1).indices,
    "sort": lambda x: x.sort(descending=True).indices,
    "stable sort": lambda x: x.sort(dim=-1, descending=True, stable=True).indices,
    "argsort": lambda x: x.argsort(descending=True),
    "int32": lambda x: x.argmax(-1).to(torch.int32),
    "reshaped": lambda x: x.topk(2, -1).indices.unsqueeze(1).transpose(1, 2).reshape(-1, 2)[:, :1].int(),
    "along another axis": lambda x: torch.stack([x, x.flip(1)], 2).topk(2, 1).indices,
    "argmax along another axis": lambda x: torch.stack([x, x.flip(1)], 2).argmax(1),
    "selected": lambda x: x.topk(2, -1).indices.select(1, 0),
    "cloned": lambda x: x.argmax(1).clone().contiguous().view(-1, 1),
}


FILES = {
    "argmax of a file": "y = ArgMax<axis=1, keepdims=0>(a)",
    "argmax kept of a file": "y = ArgMax<axis=-1>(a)",
    "argmin of a file": "b = Neg(a) y = ArgMin<axis=1, keepdims=0>(b)",
    "argmax of scores that stand in the first axis": "b = Transpose<perm=[1,0]>(a) y = ArgMax(b)",
    "topk of a file": "k = Constant<value_ints=[3]>() v, y = TopK(a, k)",
    "reshaped in a file": f"{K2} one = Constant<value_ints=[1]>() u = Unsqueeze(i, one) t = Transpose<perm=[0,2,1]>(u)"
    " to = Constant<value_ints=[-1,2]>() r = Reshape(t, to) y = Cast<to=6>(r)",
    "shaped as the input is": f"{K2} s = Shape(x) rows = Gather(s, zero) two = Constant<value_ints=[2]>()"
    " to = Concat<axis=0>(rows, two) y = Reshape(i, to)",
    "selected in a file": f"{K2} y = Gather<axis=1>(i, zero)",
    "split": f"{K2} p, y = Split<axis=1>(i, halves)",
}


def file_of(nodes: str) -> ModelProto:
    kind = "int32" if "Cast" in nodes else "int64"
    weights = {"one32": np.float32(1.0), "zero": np.asarray([0]), "halves": np.asarray([1, 1])}
    model = parsed(f"g (float[n,{WIDTH}] x) => ({kind}[p,q] y) {{ a = Mul(x, one32) {nodes} }}", weights, 13)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def tolerated_in_a_file(nodes: str, x: Tensor, near: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The masks of `tolerated`, of an ONNX file."""
    model = file_of(nodes)
    answers, tied = runtime_answers(model), tied_of_file(model)
    reference, candidate = answers({"x": x.numpy()}), answers({"x": near.numpy()})
    ties = Ties([one.output for one in tied], FileChoices(model, tied), U, lambda: [{"x": x.numpy()}])
    different = np.not_equal(reference["y"], candidate["y"])
    found = ties.tolerated({"x": x.numpy()}, reference, candidate)
    return found.get("y", np.zeros_like(different)), different


Tolerated = Callable[[Tensor, Tensor], tuple[np.ndarray, np.ndarray]]
WAYS: dict[str, Tolerated] = {name: partial(tolerated, choose) for name, choose in CHOICES.items()}
WAYS |= {name: partial(tolerated_in_a_file, nodes) for name, nodes in FILES.items()}


def close(gap_u: float) -> Tensor:
    """Scores of which the second comes up to the first in every line, so near."""
    x = scores()
    for row in x:
        first, second = row.argsort(descending=True)[:2]
        row[second] = row[first] - gap_u * U * WIDTH
    return x


def lowered(x: Tensor, by_u: float) -> Tensor:
    """The largest number of each line lowered, so that another one may be the largest."""
    return torch.where(x == x.amax(1, keepdim=True), x - by_u * U * WIDTH, x)


@pytest.mark.parametrize("kind", WAYS)
def test_first_places_that_nearly_tie_may_swap(kind):
    x = close(3.9)
    near = x.clone()
    near[::2] = lowered(x[::2], 7.8)
    tied, different = WAYS[kind](x, near)
    assert different.any() and tied[different].all()


@pytest.mark.parametrize("kind", WAYS)
def test_first_places_just_too_far_apart_may_not_swap(kind):
    x = close(4.1)
    tied, different = WAYS[kind](x, lowered(x, 8.2))
    assert different.any() and not tied[different].any()


@pytest.mark.parametrize(
    "kind",
    ["argmax", "topk", "sort", "reshaped", "along another axis", "argmax of a file",
     "argmax of scores that stand in the first axis"],
)  # fmt: skip
def test_another_class_far_away_is_not_tolerated_by_a_tie_elsewhere_in_its_line(kind):
    x = close(0.0)
    far = torch.where(x == x.amax(1, keepdim=True), torch.zeros_like(x), x)  # now the third is first
    tied, different = WAYS[kind](x, far)
    lines = different.reshape(-1, 1) if different.size == ROWS else different.reshape(ROWS, -1)
    assert lines.any(1).all() and not tied.reshape(lines.shape)[:, 0].any()


def test_the_margin_is_of_the_largest_score_over_all_judged_samples():
    x = scores()
    x[0] *= 100.0
    x[1, :2] = torch.tensor([9.0, 9.0 - 3.9 * U * 100.0 * WIDTH])
    near = x.clone()
    near[1, 0] = 0.0
    found = captured(CHOICES["argmax"], x)
    answers = [{"y0": found.run(tensor)[0].numpy()} for tensor in (x, near)]
    alone = [{"y0": answer["y0"][1:2]} for answer in answers]
    inputs = {"x": x.numpy()}
    assert ties_of(found, x).tolerated(inputs, *answers)["y0"][1]
    assert ties_of(found, x[1:2]).tolerated({"x": x[1:2].numpy()}, *alone)["y0"].tolist() == [False]
    for batches in ((x, x[1:2]), (x[1:2], x)):
        tied = ties_of(found, *batches).tolerated({"x": x[1:2].numpy()}, *alone)["y0"]
        assert tied.tolist() == [True]


def test_sentinels_stretch_no_margin_and_are_all_alike():
    x = scores()
    x[:, 0], x[:, 1] = -3.4e38, -1e10
    found = captured(lambda x: x.argsort(), x)
    (reference,) = found.run(x)
    candidate = reference.clone()
    candidate[:, :2] = reference[:, [1, 0]]
    candidate[0, -2:] = reference[0, [-1, -2]]
    tied = ties_of(found, x).tolerated(
        {"x": x.numpy()}, {"y0": reference.numpy()}, {"y0": candidate.numpy()}
    )["y0"]
    assert tied[:, :2].all() and not tied[0, -2:].any()


def test_sentinels_of_different_signs_are_not_alike():
    x = scores()
    x[:, 0], x[:, 1] = -3.4e38, 3.4e38
    found = captured(CHOICES["argmax"], x)
    reference = found.run(x)[0].numpy()
    tied = ties_of(found, x).tolerated({"x": x.numpy()}, {"y0": reference}, {"y0": reference - 1})["y0"]
    assert (reference == 1).all() and not tied.any()


@pytest.mark.parametrize("wrong", [-1, WIDTH, 1 << 40])
def test_an_index_that_is_none_is_not_tolerated(wrong):
    x = torch.ones(ROWS, WIDTH)
    found = captured(CHOICES["argmax"], x)
    reference = found.run(x)[0].numpy()
    tied = ties_of(found, x).tolerated({"x": x.numpy()}, {"y0": reference}, {"y0": reference + wrong})
    assert not tied["y0"].any()


def test_one_index_twice_is_not_tolerated_however_close():
    x = torch.ones(ROWS, WIDTH)
    found = captured(CHOICES["topk"], x)
    reference = found.run(x)[0].numpy()
    twice = np.repeat(reference[:, :1], 3, axis=1)
    tied = ties_of(found, x).tolerated({"x": x.numpy()}, {"y0": reference}, {"y0": twice})["y0"]
    assert not tied.any()


def test_whole_numbers_tie_only_where_they_are_equal():
    x = torch.tensor([[50_000.0, 49_999.0, 3.0], [7.0, 7.0, 3.0]])
    found = captured(lambda x: x.int().argmax(-1), x)
    tied = ties_of(found, x).tolerated(
        {"x": x.numpy()}, {"y0": found.run(x)[0].numpy()}, {"y0": np.array([1, 1])}
    )
    assert tied["y0"].tolist() == [False, True]


def test_a_reference_that_is_not_what_the_original_chooses_excuses_nothing():
    x = torch.ones(ROWS, WIDTH)
    found = captured(CHOICES["argmax"], x)
    other = np.full(ROWS, 3)
    tied = ties_of(found, x).tolerated({"x": x.numpy()}, {"y0": other}, {"y0": other + 1})["y0"]
    assert not tied.any()


UNTRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: x.argmax(-1) + 1,
    "looked up": lambda x: torch.arange(WIDTH)[x.argmax(-1)],
    "rounded": lambda x: x.round().long(),
    "compared": lambda x: (x > 0).long(),
    "given": lambda x: x.long(),
    "joined": lambda x: torch.cat([x.argmax(-1), x.argmin(-1)]),
}


@pytest.mark.parametrize("kind", UNTRACED)
def test_what_does_not_come_straight_from_a_choice_must_be_equal(kind):
    found = captured(UNTRACED[kind], scores())
    assert find_tied(runnable(found.program), ["y0"]) == []


def test_indices_of_a_file_that_are_computed_with_are_not_looked_for() -> None:
    for graph, tied in (
        ("(float[n,7] x) => (int64[n,3] y) { k = Constant<value_ints=[3]>() v, y = TopK(x, k) }", ["y"]),
        ("(float[n,7] x) => (int64[n] y) { i = ArgMax<axis=1,keepdims=0>(x) y = Add(i, i) }", []),
        ("(float[n,7] x) => (float[n,1] y) { i = ArgMax<axis=1>(x) y = Cast<to=1>(i) }", []),
    ):
        assert [one.output for one in tied_of_file(parsed(f"g {graph}"))] == tied


def test_an_index_that_is_answered_as_a_number_is_judged_as_a_number():
    x = torch.ones(ROWS, WIDTH)
    found = captured(lambda x: x.argmax(-1).float(), x)
    reference = found.run(x)[0].numpy()
    assert ties_of(found, x).tolerated({"x": x.numpy()}, {"y0": reference}, {"y0": reference + 1}) == {}


def test_the_values_of_a_choice_are_no_indices():
    found = captured(lambda x: x.topk(2).values, scores())
    assert find_tied(runnable(found.program), ["y0"]) == []


def test_the_original_is_run_again_only_where_integers_differ():
    x = scores()
    found = captured(CHOICES["argmax"], x)
    answer = {"y0": found.run(x)[0].numpy()}

    def judging():
        raise AssertionError("nothing differs: nothing is asked")

    ties = ties_with(found, judging)
    assert ties.tolerated({"x": x.numpy()}, answer, answer) == {}
    assert ties.tolerated({"x": x.numpy()}, answer, {"y0": answer["y0"][:2]}) == {}


def test_the_gate_passes_ties_counts_them_and_still_refuses_a_wrong_class():
    x = scores()
    x[0, :2] = 9.0
    found = captured(CHOICES["argmax"], x)
    reference = {"y0": found.run(x)[0].numpy()}
    candidate = {"y0": reference["y0"].copy()}
    candidate["y0"][0] = 1 - reference["y0"][0]
    samples, ties = tuple(range(ROWS)), ties_of(found, x)

    def report():
        tied = ties.tolerated({"x": x.numpy()}, reference, candidate)
        return judge(found.spec, "fp16", [Trial(samples, reference, candidate, tied)])

    (passed,) = report().outputs
    assert passed.passed and (passed.tied, passed.different) == (1, 0)
    candidate["y0"][3] = (candidate["y0"][3] + 1) % WIDTH
    (refused,) = report().outputs
    assert not refused.passed and (refused.tied, refused.different) == (1, 1)
    assert refused.worst_sample == 3
