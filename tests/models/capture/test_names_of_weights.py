"""Weights are put into a module under its own names, whatever wrapped it when they were saved."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from halfeven.models.capture import child, sources
from safetensors.torch import save_file, save_model
from torch import Tensor, nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight


def loaded(file: Path) -> Mapping[str, Tensor]:
    module = Tied()
    sources.load_weights(torch, module, str(file))
    return module.state_dict()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_tied_weight_may_stand_in_the_file_once_as_safetensors_saves_it(tmp_path: Path) -> None:
    module = Tied()
    save_model(module, str(tmp_path / "w.safetensors"))
    assert same(loaded(tmp_path / "w.safetensors"), module.state_dict())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_the_name_of_a_wrapper_is_left_out(wrapper: str, tmp_path: Path) -> None:
    state = Tied().state_dict()
    torch.save({wrapper + name: tensor for name, tensor in state.items()}, tmp_path / "w.pt")
    assert same(loaded(tmp_path / "w.pt"), state)


def test_a_weight_that_is_not_there_is_still_named(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items() if name != "first.bias"}
    for prefix in ("", "module."):
        save_file({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "w.safetensors")
        with pytest.raises(child.Refused, match=r'Missing key\(s\) in state_dict: "first.bias"'):
            loaded(tmp_path / "w.safetensors")


def write_shards(folder: Path, state: Mapping[str, Tensor]) -> Path:
    """The state in a file for each tensor and their index, as ``save_pretrained`` writes a large model."""
    file_of = {}
    for number, (name, tensor) in enumerate(state.items()):
        file_of[name] = f"model-{number:05}.safetensors"
        save_file({name: tensor.clone()}, folder / file_of[name])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return index


def test_weights_in_several_safetensors_files_are_taken_by_their_index(tmp_path: Path) -> None:
    state = Tied().state_dict()
    assert same(loaded(write_shards(tmp_path, state)), state)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"first.bias": "../w.safetensors"}}, "none of that name beside it"),
        ({"weight_map": {"first.bias": "gone.safetensors"}}, "'gone.safetensors'"),
        ({"weight_map": {"last.bias": "model-00001.safetensors"}}, "has no tensor 'last.bias'"),
        ({"weight_map": 3}, "is not an index of safetensors files"),
        ([], "is not an index of safetensors files"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, index: object, words: str) -> None:
    (inside := tmp_path / "inside").mkdir()
    save_file({"first.bias": torch.ones(4)}, tmp_path / "w.safetensors")
    path = write_shards(inside, Tied().state_dict())
    path.write_text(json.dumps(index))
    with pytest.raises(child.Refused, match=words):
        loaded(path)


def test_a_pickled_module_is_refused_without_the_advice_to_open_it(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(child.Refused, match="Unsupported global") as refused:
        loaded(tmp_path / "w.pt")
    assert "Please" not in str(refused.value) and "weights_only" not in str(refused.value)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_checkpoint_of_a_training_is_taken_for_its_weights(key: str, tmp_path: Path) -> None:
    state = Tied().state_dict()
    torch.save({key: state, "epoch": 3, "optimizer_state_dict": {"state": {}}}, tmp_path / "w.ckpt")
    assert same(loaded(tmp_path / "w.ckpt"), state)


def test_a_checkpoint_without_weights_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    torch.save({"net": Tied().state_dict(), "epoch": 3}, tmp_path / "w.ckpt")
    with pytest.raises(child.Refused, match="holds a dict of net, epoch, expected a state dict"):
        loaded(tmp_path / "w.ckpt")


def test_a_lazy_layer_has_the_sizes_of_its_weights_and_is_refused_without(tmp_path: Path) -> None:
    made = nn.Sequential(nn.Linear(4, 3))
    torch.save(made.state_dict(), tmp_path / "w.pt")
    lazy = sources.as_built(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(child.Refused, match=r"'0\.weight' of a lazy layer has no size yet"):
        sources.refuse_lazy(lazy)
    sources.load_weights(torch, lazy, str(tmp_path / "w.pt"))
    sources.refuse_lazy(lazy)
    assert same(lazy.state_dict(), made.state_dict())
    assert not any(parameter.requires_grad for parameter in lazy.parameters())
