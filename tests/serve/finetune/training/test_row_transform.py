"""The transform of a model folder: what it draws depends on the seed, the epoch and the row alone."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.serve.finetune.training.evaluation import loss_of_rows
from halfeven.serve.finetune.training.loop.passes import autocast_of
from halfeven.serve.finetune.training.loop.training_terms import Settings
from halfeven.serve.finetune.training.row_transform import RowTransform
from halfeven.serve.finetune.training.task import Task
from halfeven.serve.finetune.training.trainee import Trainee
from safetensors.torch import save_file
from torch import Tensor, nn

AUGMENT = """
import random
import numpy as np
import torch

def drawn(inputs, targets):
    noise = torch.rand(()) + random.random() + np.random.rand()
    inputs["x"] *= noise  # the row is the function's own
    return inputs, targets

def turned(inputs, targets):
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    inputs["x"] = (inputs["x"].reshape(2, 2) @ turn).reshape(4)
    return inputs, {"y": targets["y"].half() @ turn.half() + 1 / 3}

def fails(inputs, targets):
    return inputs["z"], targets

def no_pair(inputs, targets):
    return inputs

def wider(inputs, targets):
    return {"x": torch.cat([inputs["x"], inputs["x"]])}, targets

def half(inputs, targets):
    return {"x": inputs["x"].half()}, targets

def no_target(inputs, targets):
    return inputs, {}

def inside_of_torch(inputs, targets):
    return {"x": torch.nn.functional.interpolate(inputs["x"], 3)}, targets
"""
Part = dict[str, Tensor]


def request(folder: Path, function: str = "drawn", seed: int = 7) -> dict[str, Any]:
    (folder / "augment.py").write_text(AUGMENT)
    source = {"folder": str(folder), "path": []}
    return {"transform": f"augment.py:{function}", "source": source, "seed": seed}


def transform(folder: Path, **more: Any) -> RowTransform:
    found = RowTransform.of(request(folder, **more))
    assert found is not None
    return found


def stacked(rows: list[int]) -> tuple[Part, Part]:
    return {"x": torch.ones(len(rows), 4)}, {"y": torch.tensor(rows)}


def x_of(found: RowTransform, rows: list[int], epoch: int = 0) -> Tensor:
    found.epoch = epoch
    return found.rows(rows, *stacked(rows))[0]["x"]


def test_a_row_has_the_same_numbers_whatever_batch_it_is_in_and_others_in_another_epoch(
    tmp_path: Path,
) -> None:
    one = transform(tmp_path)
    together = x_of(one, [3, 5, 9])
    torch.manual_seed(99)
    assert torch.equal(x_of(one, [5]), together[1:2])
    assert len({float(value) for value in (*together[:, 0], *x_of(one, [3, 5, 9], epoch=1)[:, 0])}) == 6
    assert not torch.equal(x_of(transform(tmp_path, seed=8), [5]), together[1:2])


def test_the_generators_of_the_training_are_as_before(tmp_path: Path) -> None:
    one = transform(tmp_path)

    def following(calls: int) -> tuple[float, float]:
        torch.manual_seed(1)
        np.random.seed(1)
        for _ in range(calls):
            x_of(one, [1, 2])
        return float(torch.rand(())), float(np.random.rand())

    assert following(0) == following(2)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", "row 2: KeyError in augment.py, line 17: 'z'. Mend the function, or take transform out of"),
        ("inside_of_torch", "row 2: NotImplementedError in augment.py, line 32: "),
        ("no_pair", "row 2: expected (inputs, targets), two dicts, got dict"),
        ("wider", "{'x': 'float32 [4]'}, got {'x': 'float32 [8]'}"),
        ("half", "got {'x': 'float16 [4]'}"),
        ("no_target", "expected targets of the same names, shapes and dtypes, {'y': 'int64 []'}, got {}"),
        ("missing", "transform = 'augment.py:missing': augment.py has no function missing"),
    ],
)
def test_a_transform_that_cannot_be_used_is_refused_with_row_and_remedy(
    tmp_path: Path, function: str, said: str
) -> None:
    with pytest.raises(Exception, match=re.escape(said)) as refused:
        transform(tmp_path, function=function).rows([2], *stacked([2]))
    assert refused.value.code == "USER_CODE"  # type: ignore[attr-defined]


def test_a_row_is_named_as_the_caller_s_file_counts_it(tmp_path: Path) -> None:
    one = RowTransform.of(request(tmp_path, "no_pair") | {"left_out": [0, 1, 3, 9]})
    assert one is not None
    with pytest.raises(Exception, match="row 4: expected"):
        one.rows([1], *stacked([1]))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_emulated"])
def test_a_transform_computes_as_it_would_outside_of_the_training(tmp_path: Path, precision: str) -> None:
    rows, one = [1, 2], transform(tmp_path, function="turned")
    x, y = torch.randn(2, 4), torch.randn(2, 2)

    def turned() -> tuple[Tensor, Tensor]:
        targets = {"y": y.half()}
        inputs, targets = one.rows(rows, {"x": x.clone()}, targets)
        return inputs["x"], targets["y"]

    plain = turned()
    with autocast_of(Settings(precision=precision), "cpu", nn.Identity()):
        found = turned()
        assert torch.is_autocast_enabled("cpu"), "the model's forward is under it again"
    for one_part, expected in zip(found, plain, strict=True):
        assert one_part.dtype == expected.dtype and torch.equal(one_part, expected)
    assert plain[0].dtype == torch.float32


def test_rows_that_are_judged_are_not_transformed(tmp_path: Path) -> None:
    data = {"x": torch.randn(8, 4), "target:y": torch.randn(8, 4)}
    for name in ("data", "held_out"):
        save_file(data, tmp_path / f"{name}.safetensors")
    asked = request(tmp_path) | {
        "data": str(tmp_path / "data.safetensors"), "held_out": str(tmp_path / "held_out.safetensors"),
        "inputs": [{"name": "x"}], "outputs": ["y"], "losses": {"y": "mse"}, "rows": list(range(8)),
        "device": "cpu", "max_batch_size": 8,
    }  # fmt: skip
    module = nn.Identity()
    trainee = Trainee(module, lambda x: (module(x),), "module")
    learnt, held_out = Task(asked, trainee.forward), Task(asked, trainee.forward, held_out=True)
    every, plain = torch.arange(8), float(((data["x"] - data["target:y"]) ** 2).mean())
    assert float(held_out.loss(every)) == plain != float(learnt.loss(every))
    judged = loss_of_rows(trainee, learnt, every, autocast_of(Settings(precision="fp32"), "cpu", module))
    assert judged == pytest.approx(plain), "by the range test, of rows to learn from"
