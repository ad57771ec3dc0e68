"""Inputs that the conversion makes itself (perturbed, multiplied, resized) never end it: the model runs with the user's
own samples, so it is converted, whatever it computes from them as an index, a length or a size.

``HALFEVEN_FUZZ=500`` converts as many nets as that.
"""

# ruff: noqa: E501  (graphs in their own lines)

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.gate.rejudge import judge_apart
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.plan.batched import Batch
from halfeven.exporters.question import Invented, Question, answers_or_refusal
from halfeven.models.errors import NotRun, OutOfTime
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.model_folders import tensor, write_folder
from tests.slow import one_in_turn

NETS = int(os.environ.get("HALFEVEN_FUZZ", "4"))
ROWS, IDS, WIDTH = 48, 300, 8

# Computations of a file from column 0 (ids of 0 to 299), column 1 (1 to 6: lengths) and six others (normal numbers):
# each ends in a tensor 'f' of a row's own width, or of width 1.
HAZARDS = {
    "a table": "i@ = Slice(x, c0, c1, ax) k@ = Cast<to=7>(i@) e@ = Gather(table, k@) f@ = Flatten(e@)",
    "a rounded id": "i@ = Slice(x, c0, c1, ax) r@ = Round(i@) k@ = Cast<to=6>(r@) e@ = Gather(table, k@) f@ = Flatten(e@)",
    "GatherND": "i@ = Slice(x, c0, c1, ax) k@ = Cast<to=7>(i@) f@ = GatherND(table, k@)",
    "GatherElements": "i@ = Slice(x, c1, c2, ax) k@ = Cast<to=7>(i@) f@ = GatherElements<axis=1>(x, k@)",
    "ScatterElements": "i@ = Slice(x, c1, c2, ax) k@ = Cast<to=7>(i@) u@ = Slice(x, c2, c3, ax) z@ = Slice(x, c1, c8, ax) f@ = ScatterElements<axis=1>(z@, k@, u@)",
    "a scaled id": "i@ = Slice(x, c0, c1, ax) g@ = Mul(i@, tenth) h@ = Floor(g@) k@ = Cast<to=7>(h@) e@ = Gather(small, k@) f@ = Flatten(e@)",
    "one-hot rows": "i@ = Slice(x, c1, c2, ax) k@ = Cast<to=7>(i@) o@ = OneHot(k@, depth, onoff) f@ = Squeeze(o@, ax)",
    "a range": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) k@ = Cast<to=7>(m@) n@ = Range(zero, k@, one) t@ = Cast<to=1>(n@) s@ = ReduceSum<keepdims=0>(t@) v@ = Slice(x, c2, c8, ax) f@ = Mul(v@, s@)",
    "a cut": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) k@ = Cast<to=7>(m@) e@ = Unsqueeze(k@, c0) v@ = Slice(x, c0, e@, ax) f@ = ReduceMean<axes=[1]>(v@)",
    "a gathered range": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) k@ = Cast<to=7>(m@) n@ = Range(zero, k@, one) v@ = Gather<axis=1>(x, n@) f@ = ReduceMean<axes=[1]>(v@)",
    "a repeated axis": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) k@ = Cast<to=7>(m@) q@ = Unsqueeze(k@, c0) t@ = Concat<axis=0>(c1, q@) v@ = Slice(x, c2, c3, ax) w@ = Tile(v@, t@) f@ = ReduceSum(w@, ax)",
    "a shape": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) k@ = Cast<to=7>(m@) q@ = Unsqueeze(k@, c0) t@ = Concat<axis=0>(q@, c1) z@ = ConstantOfShape(t@) s@ = ReduceSum<keepdims=0>(z@) v@ = Slice(x, c2, c8, ax) f@ = Add(v@, s@)",
    "an item of a list": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) k@ = Cast<to=7>(m@) l@ = SplitToSequence<axis=1>(x, one) f@ = SequenceAt(l@, k@)",
    "passes of a loop": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) q@ = Exp(m@) k@ = Cast<to=7>(q@) v@ = Slice(x, c2, c8, ax) f@ = Loop(k@, yes, v@) <body = b@ (int64 p@, bool c@, float[n,6] s@) => (bool o@, float[n,6] t@) { o@ = Identity(c@) h@ = Sin(s@) t@ = Add(h@, tenth) }>",
    "a loop until": "v@ = Slice(x, c2, c8, ax) f@ = Loop(endless, yes, v@) <body = b@ (int64 p@, bool c@, float[n,6] s@) => (bool o@, float[n,6] t@) { t@ = Mul(s@, two) a@ = Abs(t@) m@ = ReduceMax<keepdims=0>(a@) o@ = Less(m@, twenty) }>",
    "an exponential length": "i@ = Slice(x, c1, c2, ax) m@ = ReduceMax<keepdims=0>(i@) q@ = Exp(m@) k@ = Cast<to=7>(q@) e@ = Unsqueeze(k@, c0) z@ = ConstantOfShape(e@) s@ = ReduceSum<keepdims=0>(z@) v@ = Slice(x, c2, c8, ax) f@ = Add(v@, s@)",
    "a threshold": "i@ = Slice(x, c2, c3, ax) g@ = Greater(i@, half) v@ = Slice(x, c3, c8, ax) f@ = Where(g@, v@, zerof)",
}


def constants(random: np.random.Generator) -> dict[str, np.ndarray]:
    ends = {f"c{n}": np.array([n]) for n in (0, 1, 2, 3, 8)}
    return {
        **ends,
        "ax": np.array([1]),
        "yes": np.array(True),
        "endless": np.array(np.iinfo(np.int64).max),
        "two": np.array(2.0, np.float32),
        "twenty": np.array(20.0, np.float32),
        "zero": np.array(0),
        "one": np.array(1),
        "depth": np.array(7),
        "onoff": np.array([0, 1], np.float32),
        "tenth": np.array(0.1, np.float32),
        "half": np.array(0.5, np.float32),
        "zerof": np.array(0.0, np.float32),
        "table": random.standard_normal((IDS, WIDTH)).astype(np.float32),
        "small": random.standard_normal((IDS // 10, WIDTH)).astype(np.float32),
    }


def drawn(random: np.random.Generator, fraction: float = 0.0) -> np.ndarray:
    """``fraction``: up to which ids and lengths are above whole numbers, so that their perturbed copies leave tables."""
    x = random.standard_normal((ROWS, 8)).astype(np.float32)
    x[:, 0], x[:, 1] = random.integers(0, IDS, ROWS), random.integers(1, 7, ROWS)
    x[:, :2] += random.uniform(0, fraction, (ROWS, 2))
    return x


def net(
    names: list[str], random: np.random.Generator, path: Path, fraction: float = 0.0
) -> tuple[Path, Path]:
    """A file with these hazards beside a layer of plain numbers, and a file of samples that it runs with."""
    body = " ".join(HAZARDS[name].replace("@", str(number)) for number, name in enumerate(names))
    features = ", ".join(f"f{number}" for number in range(len(names)))
    text = f"g (float[n,8] x) => (float[n,3] y) {{ {body} d = Slice(x, c2, c8, ax) all = Concat<axis=1>({features}, d) a = MatMul(all, w) b = Relu(a) y = MatMul(b, out) }}"
    weights = constants(random)
    x = drawn(random, fraction)
    widths = onnx_width(text, weights, x)
    weights["w"] = (random.standard_normal((widths, 16)) / np.sqrt(widths)).astype(np.float32)
    weights["out"] = random.standard_normal((16, 3)).astype(np.float32) / 4
    onnx.save(parsed(text, weights), path / "net.onnx")
    np.savez(path / "samples.npz", x=x)
    return path / "net.onnx", path / "samples.npz"


def onnx_width(text: str, weights: Mapping[str, np.ndarray], x: np.ndarray) -> int:
    """The number of features that the layers get."""
    import onnxruntime

    head, _, _ = text.partition(" a = MatMul")
    model = parsed(head.replace("float[n,3] y", "float[n,k] all") + " }", weights)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0]).shape[1]


@pytest.mark.slow
@pytest.mark.few_unseen
@pytest.mark.parametrize("number", range(NETS))
def test_a_file_that_runs_with_the_user_s_samples_is_converted(number: int, tmp_path: Path) -> None:
    random = np.random.default_rng()
    names = list(random.choice([*HAZARDS], int(random.integers(1, 4)), replace=False))
    if number < len(HAZARDS) and len(HAZARDS) < NETS:
        names = [[*HAZARDS][number]]
    level = str(random.choice(["O1", "O2", "O3"]))
    file, samples = net(names, random, tmp_path, float(random.choice([0.0, 0.4])))
    # The written half of ``fp16`` is proven once more, by engines as they serve.
    road = random.choice(["convert", "fp16"])
    target = ("--store", tmp_path / "store") if road == "convert" else ("--out", tmp_path / "half.onnx")
    code, _, said = run(road, file, "--samples", samples, "--level", level, *target)
    assert code in (0, 3) and "Traceback" not in said, (road, names, level, said)


@pytest.mark.slow
def test_an_input_of_ours_that_the_original_takes_only_as_it_is_served_is_not_held_against_a_half(
    tmp_path: Path,
) -> None:
    """ONNX Runtime makes a slice of a Gather at a Range, which takes indices beyond the table; node by node, as halves
    are judged, it refuses them."""
    file, samples = net(["a gathered range"], np.random.default_rng(), tmp_path)
    code, facts, said = run("convert", file, "--samples", samples, "--store", tmp_path / "store")
    assert code == 0 and facts["half"] == "fp16", said
    assert not any("does not run" in kept["evidence"] for kept in facts["forms"]["onnx"]["kept"])


@pytest.mark.slow
def test_a_length_that_is_the_same_in_all_samples_is_proven_again_as_it_was(tmp_path: Path) -> None:
    """A perturbed sample makes another length, and ONNX Runtime raises an error of a kind of its own."""
    text = "g (float[n,8] x) => (float[n,3] y) { i = Slice(x, c0, c1, ax) m = ReduceMax<keepdims=0>(i) r = Round(m) k = Cast<to=7>(r) n = Range(zero, k, one) t = Cast<to=1>(n) v = Mul(t, four) s = ReduceSum<keepdims=0>(v) a = MatMul(x, w) b = Relu(a) h = MatMul(b, out) y = Add(h, s) }"
    random = np.random.default_rng()
    weights = constants(random) | {
        "four": np.full(4, 0.01, np.float32),
        "w": random.standard_normal((8, 16)).astype(np.float32),
        "out": random.standard_normal((16, 3)).astype(np.float32),
    }
    onnx.save(parsed(text, weights), tmp_path / "net.onnx")
    x = random.standard_normal((ROWS, 8)).astype(np.float32)
    x[:, 0] = 4
    np.savez(tmp_path / "samples.npz", x=x)
    words = ("--samples", tmp_path / "samples.npz", "--out", tmp_path / "half.onnx")
    code, _, said = run("fp16", tmp_path / "net.onnx", *words)
    assert code == 0, said
    assert run("verify", tmp_path / "half.onnx")[0] == 0


TABLES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(300, 8), nn.Linear(20, 3)

    def forward(self, x):
        ids, place = x[:, 0].long(), x[:, 1:2].long()
        picked = x.gather(1, place)
        scattered = torch.zeros_like(x[:, 2:]).scatter(1, place - 1, x[:, 2:3])
        kinds = nn.functional.one_hot(place[:, 0], 7)[:, :5].float()
        return self.layer(torch.cat([self.table(ids), picked, scattered, kinds], 1))

def build():
    torch.manual_seed(5)
    return Net()
"""


@pytest.mark.few_unseen
@pytest.mark.slow
@pytest.mark.parametrize("level", one_in_turn(["O1", "O3"], 0))
def test_a_captured_program_that_reads_tables_is_converted(level: str, tmp_path: Path) -> None:
    x = drawn(np.random.default_rng())[:20]
    # Every second copy of the first and the last id is beyond the table; every second sample judges.
    x[:, 0] = np.resize([0.4, 0.4, IDS - 0.6, IDS - 0.6], 20)
    x[:, 1] = np.resize([1, 5, 5, 1], 20)
    folder = write_folder(
        tmp_path / "net",
        TABLES,
        inputs=[tensor("x", "FP32", [-1, 8])],
        samples={"x": x},
        precision={"level": level},
    )
    code, facts, said = run("convert", folder, "--store", tmp_path / "store")
    assert code in (0, 3) and "Traceback" not in said, said
    assert any("perturbed inputs" in note for note in facts["notes"]), (
        "ids leave the table, and the report says so"
    )


def test_of_invented_rows_those_that_the_model_refuses_are_left_out_and_counted() -> None:
    def original(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if (inputs["x"] > 5).any():
            raise NotRun("a place beyond the table")
        return {"y": inputs["x"] * 2}

    x = np.arange(8, dtype=np.float32)[:, None]
    invented = Invented(original)
    questions = [Question((0, 1, 2, 3), {"x": x[:4]}, {}), Question((4, 5, 6, 7), {"x": x[4:]}, {})]
    taken = list(invented.answered(questions))
    assert [one.samples for one in taken] == [(0, 1, 2, 3), (4,), (5,)]
    assert all(np.array_equal(one.reference["y"], 2 * one.inputs["x"]) for one in taken)
    assert (invented.made, invented.refused, invented.is_used) == (8, 2, True)
    list(invented.answered([Question((9,), {"x": x[6:]}, {})] * 5))
    assert not invented.is_used


@pytest.mark.parametrize(
    "error", [RuntimeError("not enough memory: you tried to allocate"), OutOfTime("no time left")]
)
def test_a_half_that_lacked_memory_or_time_is_not_refused(error: Exception) -> None:
    def half(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise error

    x = np.zeros((2, 1), np.float32)
    with pytest.raises(type(error)):
        answers_or_refusal(half, {"x": x})
    asked = Question((0,), {"x": x[:1]}, {"y": x[:1]})
    for batch in (Batch((asked,)), Batch((asked, replace(asked, samples=(1,))))):
        with pytest.raises(type(error)):
            list(batch.answers(half))


def test_a_half_that_refuses_a_perturbed_sample_is_refused_in_words_of_that_sample() -> None:
    spec = ModelSpec("m", (x := TensorSpec("x", "FP32", (Dim(), Dim(1, 1))),), (replace(x, name="y"),), 8)
    trial = Trial((3,), {"y": np.zeros((1, 1), np.float32)}, {}, refused="index 7 is out of bounds")
    report = judge_apart(spec, "fp16", [trial], {})
    assert report is not None and not report.passed
    (failure,) = report.all_failures
    assert "perturbed" in failure.message and "index 7 is out of bounds" in failure.message
