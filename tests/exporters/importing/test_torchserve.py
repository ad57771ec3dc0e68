"""A TorchServe archive becomes a model folder; code in pickles is refused and never run."""

import io
import json
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.importing.imported import Refusal, Written, write_toml
from halfeven.exporters.importing.torchserve import take_archives
from halfeven.models.errors import BadFolder
from halfeven.models.store.store import Store
from halfeven.models.zoo import hf_bert
from safetensors.torch import save
from torch import nn

from tests.command_line import run
from tests.exporters.importing.server_files import MODEL_FILE, archive, saved
from tests.exporters.onnx.small_files import mlp
from tests.real.asking import CLOSE, asked_over_http

SAMPLES = {"x": np.random.default_rng(3).standard_normal((16, 4)).astype(np.float32)}


class Runs:
    """An object that writes a file when it is unpickled without a guard."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


class Net(nn.Module):
    """The module of `MODEL_FILE`, with its names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def onnx_bytes() -> bytes:
    return mlp().SerializeToString()


def taken(
    path: Path, out: Path, samples: dict[str, np.ndarray] | None = None
) -> tuple[dict[str, Any], Written]:
    (one,) = take_archives([path], out, samples, overwrite=False)
    assert isinstance(one, Written), one
    return tomllib.loads((one.folder / "model.toml").read_text()), one


def refusal(path: Path, samples: dict[str, np.ndarray] | None = None) -> str:
    (one,) = take_archives([path], path.parent / "out", samples, overwrite=False)
    assert isinstance(one, Refusal) and not (path.parent / "out").exists()
    return str(one.error)


def test_an_onnx_file_is_taken_with_labels_and_batch_and_the_rest_is_named(tmp_path: Path) -> None:
    labels = {"0": "a", "1": ["n01", "b"], "2": "c", "3": "d"}
    settings = "# of one model\nbatchSize: 12\nmaxBatchDelay: 5\nresponseTimeout: 120\nhandler:\n  deep: 1\n"
    files = {
        "net.onnx": onnx_bytes(),
        "index_to_name.json": json.dumps(labels),
        "model-config.yaml": settings,
        "handler.py": "raise SystemExit",
    }
    keys = {"serializedFile": "net.onnx", "handler": "handler.py:handle", "configFile": "model-config.yaml"}
    path = archive(tmp_path / "net.mar", files, **keys)
    toml, one = taken(path, tmp_path / "out")
    assert (toml["name"], toml["source"], toml["max_batch_size"]) == ("net", "net.onnx", 12)
    assert toml["outputs"][0]["labels"] == ["a", "b", "c", "d"] and toml["batching"] == {
        "max_queue_delay_us": 5000
    }
    assert {file.name for file in one.folder.iterdir()} == {"model.toml", "net.onnx"}
    assert [line.partition(": it")[0] for line in one.left] == [
        "handler 'handler.py:handle'",
        "model-config.yaml: responseTimeout",
        "model-config.yaml: handler",
    ]


def test_the_output_of_an_image_classifier_is_taken_for_logits_until_confirmed(tmp_path: Path) -> None:
    labels = json.dumps({str(index): str(index) for index in range(4)})
    files = {"net.onnx": onnx_bytes(), "index_to_name.json": labels}
    path = archive(tmp_path / "net.mar", files, serializedFile="net.onnx", handler="image_classifier")
    toml, one = taken(path, tmp_path / "out")
    assert toml["outputs"][0]["kind"] == "logits"
    assert any("softmax" in line for line in one.guess.reasons)


@pytest.mark.parametrize("labels", ['{"0": "a"}', '{"0": 1, "1": 2, "2": 3, "3": 4}', "[]", '{"a": "b"}'])
def test_labels_that_do_not_fit_are_left_and_named(labels: str, tmp_path: Path) -> None:
    files = {"net.onnx": onnx_bytes(), "index_to_name.json": labels}
    toml, one = taken(archive(tmp_path / "net.mar", files, serializedFile="net.onnx"), tmp_path / "out")
    assert "labels" not in toml["outputs"][0] and one.left[0].startswith("index_to_name.json: expected")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["net.pth", "net.safetensors"])
def test_weights_with_their_model_file_convert_and_answer_as_the_module_does(
    weights: str, tmp_path: Path
) -> None:
    net = Net()
    state = dict(net.state_dict())
    files = {"net.py": MODEL_FILE, weights: save(state) if weights.endswith("s") else saved(net.state_dict())}
    path = archive(
        tmp_path / "net.mar", files, serializedFile=weights, modelFile="net.py", handler="base_handler"
    )
    np.savez(tmp_path / "inputs.npz", x=SAMPLES["x"])
    code, facts, said = run("import", path, tmp_path / "out", "--samples", tmp_path / "inputs.npz")
    assert code == 0, said
    code, _, said = run(
        "convert", facts["models"][0]["folder"], "--store", tmp_path / "store", "--form", "torch"
    )
    assert code == 0, said
    x = np.random.default_rng().standard_normal((3, 4)).astype(np.float32)
    store = Store(tmp_path / "store")
    answer = asked_over_http(store, store.version("net", 1).spec(), {"x": x})["output"]
    with torch.no_grad():
        expected = net(torch.from_numpy(x)).numpy()
    assert np.allclose(answer, expected, atol=CLOSE * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
def test_a_model_file_that_has_the_handler_too_is_taken(tmp_path: Path) -> None:
    files = {"net.py": MODEL_FILE, "w.pt": saved(Net().state_dict()), "model-config.yaml": ""}
    keys = {"serializedFile": "w.pt", "modelFile": "net.py", "configFile": "model-config.yaml"}
    _, one = taken(
        archive(tmp_path / "net.mar", files, **keys, handler="net.py:handle"), tmp_path / "out", SAMPLES
    )
    written = {file.name for file in one.folder.iterdir()}
    assert written == {"model.toml", "net.py", "w.pt", "samples.safetensors"}


@pytest.mark.slow
def test_a_transformers_folder_in_an_archive_is_taken_as_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = Path(hf_bert.__file__).parent
    files = {name: (source / name).read_bytes() for name in ("config.json", "model.safetensors")}
    toml, _ = taken(
        archive(tmp_path / "net.mar", files, serializedFile="model.safetensors"), tmp_path / "out"
    )
    assert toml["source"] == "hf:." and [t["name"] for t in toml["inputs"]] == ["input_ids", "attention_mask"]


def test_weights_without_inputs_ask_for_them(tmp_path: Path) -> None:
    files = {"net.py": MODEL_FILE, "net.pt": saved(Net().state_dict())}
    assert "--samples FILE" in refusal(
        archive(tmp_path / "net.mar", files, serializedFile="net.pt", modelFile="net.py")
    )


@pytest.mark.slow(seconds=6)
def test_a_pickled_module_is_refused_with_the_way_out_and_never_run(tmp_path: Path) -> None:
    for name, thing in (("module", nn.Linear(4, 3)), ("code", {"w": Runs(tmp_path / "ran")})):
        files = {"net.py": MODEL_FILE, "net.pt": saved(thing)}
        said = refusal(
            archive(tmp_path / f"{name}.mar", files, serializedFile="net.pt", modelFile="net.py"), SAMPLES
        )
        assert (
            "not a state dict of tensors alone" in said and "torch.save(model.state_dict(), 'net.pt')" in said
        )
        said = refusal(archive(tmp_path / f"{name}.mar", {"net.pt": saved(thing)}, serializedFile="net.pt"))
        assert "torch.onnx.export" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_torchscript_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4)), file)
    files = {"net.py": MODEL_FILE, "net.pt": file.getvalue()}
    assert "torch.onnx.export" in refusal(archive(tmp_path / "a.mar", files, serializedFile="net.pt"))
    said = refusal(archive(tmp_path / "b.mar", files, serializedFile="net.pt", modelFile="net.py"), SAMPLES)
    assert "TorchScript" in said and "state_dict" in said


@pytest.mark.slow
def test_weights_that_do_not_fit_their_module_are_refused(tmp_path: Path) -> None:
    files = {"net.py": MODEL_FILE, "net.pt": saved({"layers.0.weight": torch.zeros(2, 2)})}
    path = archive(tmp_path / "net.mar", files, serializedFile="net.pt", modelFile="net.py")
    assert "net.pt does not fit the module" in refusal(path, SAMPLES)
    files = {"net.py": MODEL_FILE, "net.pt": saved({"weights": Net().state_dict()})}
    path = archive(tmp_path / "nested.mar", files, serializedFile="net.pt", modelFile="net.py")
    assert "expected a state dict" in refusal(path, SAMPLES)


@pytest.mark.parametrize("code", ["", MODEL_FILE + "\nclass Other(nn.Module): ...\n", "class : broken"])
def test_a_model_file_without_one_class_is_refused_unread(code: str, tmp_path: Path) -> None:
    files = {"net.py": code, "net.pt": saved({})}
    said = refusal(archive(tmp_path / "net.mar", files, serializedFile="net.pt", modelFile="net.py"), SAMPLES)
    assert "is not Python" in said if "broken" in code else "expected one, as TorchServe does" in said


@pytest.mark.parametrize(
    ("manifest", "fault"),
    [
        ("no", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no model"),
        ('{"model": {}}', "no serializedFile"),
        ('{"model": {"serializedFile": 7}}', "serializedFile = 7: expected a string"),
        ('{"model": {"serializedFile": "none.onnx"}}', "which is no file of the archive"),
        ('{"model": {"serializedFile": "../net.onnx"}}', "which is no file of the archive"),
        ('{"model": {"serializedFile": "net.onnx", "modelName": "../../up"}}', None),
    ],
)
def test_a_manifest_of_any_kind_is_read_strictly(manifest: str, fault: str | None, tmp_path: Path) -> None:
    path = tmp_path / "net.mar"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("MAR-INF/MANIFEST.json", manifest)
        packed.writestr("net.onnx", onnx_bytes())
    if fault is not None:
        assert fault in refusal(path)
    else:
        _, one = taken(path, tmp_path / "out")
        assert one.folder.parent == tmp_path / "out" and one.folder.name == "up"


def test_data_outside_of_the_archive_is_not_read_or_written(tmp_path: Path) -> None:
    onnx.save_model(
        mlp(), tmp_path / "net.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    model = onnx.load(tmp_path / "net.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = f"../{tmp_path.name}/w.bin"
    path = archive(tmp_path / "net.mar", {"net.onnx": model.SerializeToString()}, serializedFile="net.onnx")
    assert "outside the model folder" in refusal(path)


def test_a_folder_that_could_not_be_read_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "net.mar", {"net.onnx": onnx_bytes()}, serializedFile="net.onnx")
    _, one = taken(path, tmp_path / "out")
    with pytest.raises(BadFolder, match=r"cannot be read: model\.toml: .*'net\.onnx'"):
        write_toml(one.guess, (), tmp_path)


@pytest.mark.slow
def test_files_of_the_folder_are_overwritten_only_when_that_is_asked(tmp_path: Path) -> None:
    path = archive(tmp_path / "net.mar", {"net.onnx": onnx_bytes()}, serializedFile="net.onnx")
    mine = tmp_path / "out/net/net.onnx"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    code, _, said = run("import", path, tmp_path / "out")
    assert code == 2 and f"{mine} exists" in said and mine.read_bytes() == b"mine"
    code, _, said = run("import", path, tmp_path / "out", "--force")
    assert code == 0 and mine.read_bytes() == onnx_bytes(), said
    mine.unlink()
    mine.mkdir()
    code, _, said = run("import", path, tmp_path / "out", "--force")
    assert code == 2 and f"{mine} is in the way of a file" in said


def test_a_folder_of_archives_is_taken_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    archive(tmp_path / "store/one.mar", {"net.onnx": onnx_bytes()}, serializedFile="net.onnx")
    (tmp_path / "store/torn.mar").write_bytes(b"no")
    code, facts, said = run("import", tmp_path / "store", tmp_path / "out")
    assert code == 0, said
    assert [one["model"] for one in facts["models"]] == ["one"]
    assert [one["model"] for one in facts["refused"]] == ["torn.mar"]
    assert run("import", tmp_path / "store/torn.mar", tmp_path / "out")[0] == 2


def test_the_second_archive_of_a_name_is_refused_whatever_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for number in (1, 2):
        files = {"net.onnx": mlp(seed=number).SerializeToString()}
        archive(tmp_path / f"store/net_v{number}.mar", files, serializedFile="net.onnx", modelName="net")
    for _ in range(2):
        code, facts, said = run("import", tmp_path / "store", tmp_path / "out", "--force")
        assert code == 0, said
        assert [Path(one["from"]).name for one in facts["models"]] == ["net_v1.mar"]
        (refused,) = facts["refused"]
        assert "net_v2.mar and net_v1.mar have the same name here, 'net'" in refused["reason"]
    assert (tmp_path / "out/net/net.onnx").read_bytes() == mlp(seed=1).SerializeToString()
