"""Rows are filled up to a common length only where that is proven to change no answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.synthetic import generate
from halfeven.exporters.proof.prove import ReferenceRun, ask_reference, judged, take
from halfeven.exporters.question import Answers, Arrays
from halfeven.models.spec.filled_lengths import Lengths
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store

SIZES = (8, 16, 24)


def tensor(name: str, *shape: int | str, datatype: str = "INT64", lengths_of: str = "") -> TensorSpec:
    sizes = tuple(Dim.parse(size) for size in (-1, *shape))
    return TensorSpec(name, datatype, sizes, lengths_of=lengths_of)


def masked(*outputs: TensorSpec, mask: str = "attention_mask", length: str = "length=2..24") -> ModelSpec:
    inputs = (tensor("ids", length), tensor(mask, length))
    return ModelSpec("m", inputs, outputs, 4, batching=Batching(lengths=SIZES))


POOLED = tensor("y", 6, datatype="FP32")
STATES = tensor("h", "length", 6, datatype="FP32")
TABLE = np.random.default_rng(3).standard_normal((100, 6)).astype(np.float32)


def mean(inputs: Arrays) -> dict[str, np.ndarray]:
    mask = inputs["attention_mask"][..., None].astype(np.float32)
    return {"y": (TABLE[inputs["ids"]] * mask).sum(1) / mask.sum(1)}


def mean_of_all(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": TABLE[inputs["ids"]].mean(1)}


def from_the_end(inputs: Arrays) -> dict[str, np.ndarray]:
    places = np.arange(inputs["ids"].shape[1])[::-1, None].astype(np.float32)
    mask = inputs["attention_mask"][..., None].astype(np.float32)
    return {"y": ((TABLE[inputs["ids"]] + places) * mask).sum(1) / mask.sum(1)}


def states(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"h": TABLE[inputs["ids"]]}


def zero_over_zero(inputs: Arrays) -> dict[str, np.ndarray]:
    with np.errstate(invalid="ignore"):
        return {"h": TABLE[inputs["ids"]] * (inputs["attention_mask"] / inputs["attention_mask"])[..., None]}


def short_table(inputs: Arrays) -> dict[str, np.ndarray]:
    if inputs["ids"].shape[1] > 16:
        raise IndexError("index out of range in self")
    return mean(inputs)


def run_of(spec: ModelSpec, original: Answers) -> ReferenceRun:
    return ask_reference(spec, generate(spec, 16), original)


@pytest.mark.parametrize(
    ("original", "spec"),
    [(mean, masked(POOLED)), (states, masked(STATES)), (zero_over_zero, masked(STATES))],
)
def test_a_model_that_its_mask_keeps_from_filled_up_places_is_asked_so(
    original: Answers, spec: ModelSpec
) -> None:
    run = run_of(spec, original)
    assert run.joined.refused == "" and run.joined.differs <= 1e-6
    asked = [
        (size := question.inputs["ids"].shape[1], far.size("length", size))
        for far, question in run.joined.questions
    ]
    # The shortest that goes into each size, and one half way to it; then the shortest of all in the longest batch.
    assert asked == [(2, 8), (5, 8), (9, 16), (12, 16), (17, 24), (20, 24), (2, 24)]
    assert "filled up to 8, 16, 24: that changes no FP32 answer" in run.joined.sentence(SIZES)


@pytest.mark.parametrize(
    ("original", "spec", "why"),
    [
        (mean_of_all, masked(POOLED), r"'length' of 2 filled up to 8, output 'y' differs by 0\.\d+ of its"),
        (from_the_end, masked(POOLED), "output 'y' differs by"),
        (states, masked(tensor("h", -1, 6, datatype="FP32")), r"'h' has shape \[4, 8, 6\], expected \[4, 2, 6\]"),
        (short_table, masked(POOLED), "'length' of 17 filled up to 24: index out of range"),
        (mean, masked(POOLED, length="2..24"), "of a named free axis"),
    ],
)  # fmt: skip
def test_what_differs_once_it_is_filled_up_is_refused_by_name(
    original: Answers, spec: ModelSpec, why: str
) -> None:
    joined = run_of(spec, original).joined
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(joined.refused)
    assert joined.refused in joined.sentence(SIZES) and "not filled up" in joined.sentence(SIZES)


def test_a_mean_of_all_places_is_found_where_the_shortest_row_is_one_place() -> None:
    spec = replace(masked(POOLED, length="length=1..24"), batching=Batching(lengths=(24,)))
    assert run_of(spec, mean).joined.refused == ""
    run = run_of(spec, mean_of_all)
    assert "filled up to 24" in run.joined.refused
    assert not judged(
        run, "fp16", [take(run, mean_of_all)]
    ).passed  # a stored version that asks for lengths all the same


def test_the_shortest_row_is_asked_in_a_batch_of_the_longest() -> None:
    def window(inputs: Arrays) -> dict[str, np.ndarray]:  # sees all places where few of them are kept
        few = inputs["ids"].shape[1] > 9 * inputs["attention_mask"].sum(1, keepdims=True)
        return {"y": np.where(few, mean_of_all(inputs)["y"], mean(inputs)["y"])}

    spec = masked(POOLED)
    samples = generate(spec, 16)
    samples.arrays["attention_mask"][:] = 1
    refused = ask_reference(spec, samples, window).joined.refused
    assert "'length' of 2 filled up to 24, output 'y' differs by" in refused


def test_a_class_is_asked_of_more_rows_than_its_scores() -> None:
    spec = masked(tensor("class"))
    ids = generate(spec, 64).arrays["ids"]

    def rare(inputs: Arrays) -> dict[str, np.ndarray]:
        is_unlike_the_first = ~np.isin(inputs["ids"][:, 0], ids[:4, 0])
        return {"class": is_unlike_the_first * inputs["ids"].shape[1]}

    assert ask_reference(spec, generate(spec, 64), rare).joined.refused


def test_an_axis_that_an_input_has_the_lengths_of_is_filled_up_without_a_mask() -> None:
    inputs = (
        tensor("sound", "frames=1..24", 3, datatype="FP32"),
        tensor("lengths", lengths_of="frames"),
    )
    spec = ModelSpec("m", inputs, (tensor("y", 3, datatype="FP32"),), 4, batching=Batching(lengths=SIZES))

    def total(arrays: Arrays) -> dict[str, np.ndarray]:
        kept = np.arange(arrays["sound"].shape[1]) < arrays["lengths"][:, None]
        return {"y": np.where(kept[..., None], arrays["sound"], np.float32(0)).sum(1)}

    assert run_of(spec, total).joined.refused == ""
    assert run_of(spec, lambda arrays: {"y": arrays["sound"].sum(1)}).joined.refused


def test_a_half_that_is_wrong_only_where_it_is_filled_up_is_refused() -> None:
    run = run_of(masked(POOLED), mean)

    def half(inputs: Arrays) -> dict[str, np.ndarray]:
        filled = (inputs["attention_mask"][:, -1:] == 0).all() and inputs["ids"].shape[1] in SIZES
        return {"y": mean(inputs)["y"] * np.float32(1 + 0.25 * filled)}

    only = replace(run, perturbed=[], adversarial=[], small=[], bulk=run.bulk)
    assert judged(only, "fp16", [take(only, mean)]).passed
    refused = judged(only, "fp16", [take(only, half)])
    assert not refused.passed


_NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(100, 16), nn.Linear(16, 6)

    def forward(self, ids, attention_mask):
        x, mask = self.table(ids), attention_mask[..., None].float()
        return self.head({pooled})

def build():
    torch.manual_seed(0)
    return Net()
"""
_TOML = """
name = "net"
source = "model.py:build"
max_batch_size = 4
[[inputs]]
name = "ids"
datatype = "INT64"
shape = [-1, "length=2..24"]
[[inputs]]
name = "attention_mask"
datatype = "INT64"
shape = [-1, "length=2..24"]
[[outputs]]
name = "y"
datatype = "FP32"
shape = [-1, 6]
[batching]
lengths = [8, 16]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pooled", "lengths", "said"),
    [
        ("(x * mask).sum(1) / mask.sum(1)", (8, 16), "that changes no FP32 answer by more than"),
        ("x.mean(1)", (), "does not leave out what its mask leaves out"),
    ],
)
def test_a_version_has_the_lengths_that_are_proven_and_says_why_it_has_none(
    tmp_path: Path, pooled: str, lengths: tuple[int, ...], said: str
) -> None:
    (tmp_path / "model.py").write_text(_NET.format(pooled=pooled))
    (tmp_path / "model.toml").write_text(_TOML)
    version = convert(tmp_path, Store(tmp_path / "store"), Options(("torch",))).version
    assert version.spec().batching.lengths == lengths
    assert any(said in note for note in version.manifest["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_of_transformers_answers_a_filled_up_row_as_the_row_alone(attention: str) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 24}
    more: dict[str, Any] = {"num_attention_heads": 4, "attn_implementation": attention}
    config = BertConfig(**sizes, intermediate_size=64, **more)
    torch.manual_seed(0)
    net = BertModel(config).eval()

    def original(arrays: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            out = net(*(torch.from_numpy(arrays[name]) for name in ("ids", "attention_mask")))
        return {"h": out.last_hidden_state.numpy(), "y": out.pooler_output.numpy()}

    spec = masked(tensor("h", "length", 32, datatype="FP32"), tensor("y", 32, datatype="FP32"))
    joined = run_of(spec, original).joined
    assert joined.refused == "" and 0 < joined.differs < 1e-5


@pytest.mark.parametrize("fill", [8, 16, 24])
def test_filling_up_repeats_the_last_place_and_masks_it(fill: int) -> None:
    spec = masked(STATES)
    lengths = Lengths.of(spec)
    assert lengths is not None
    arrays = [np.arange(3 * (fill - 3)).reshape(3, -1), np.ones((3, fill - 3), np.int64)]
    ids, mask = lengths.filled(arrays, ((fill,), (fill,)))
    assert ids.shape == mask.shape == (3, fill)
    assert (ids[:, fill - 3 :] == arrays[0][:, -1:]).all() and (ids[:, : fill - 3] == arrays[0]).all()
    assert (mask.sum(1) == fill - 3).all()
    (cut,) = lengths.cut([np.zeros((3, fill, 6))], arrays)
    assert cut.shape == (3, fill - 3, 6) and cut.flags.c_contiguous
    assert lengths.shared(((9,), (9,))) == ((16,), (16,))
    empty = [np.zeros((3, 0), np.int64)] * 2  # shares no batch with others
    assert [array.shape for array in lengths.filled(empty, ((0,), (0,)))] == [(3, 0)] * 2
    assert lengths.shared(((0,), (0,))) == ((0,), (0,))


def test_lengths_are_never_filled_up_where_nothing_asks_for_it() -> None:
    assert Lengths.of(replace(masked(POOLED), batching=Batching())) is None
    assert Lengths.of(replace(masked(POOLED), max_batch_size=0)) is None
    assert Lengths.of(masked(POOLED, mask="attention_bias")) is None
