"""Models of other libraries: the message says what the file or folder is and how it becomes a model of ours."""

from pathlib import Path

import pytest
from halfeven.exporters.guessing.bare import folder_at, guess_at
from halfeven.models.errors import BadFolder


@pytest.mark.parametrize(
    ("name", "what", "how"),
    [
        (
            "saved/saved_model.pb",
            "saved model of TensorFlow",
            "tf2onnx.convert --saved-model {} --output model.onnx",
        ),
        ("net.keras", "model of Keras", 'load_model\\("{}"\\).export\\("model.onnx", format="onnx"\\)'),
        ("net.H5", "model of Keras", "makes an ONNX file of it"),
        ("net.tflite", "model of TensorFlow Lite", "tf2onnx.convert --tflite {} --output"),
        ("net.joblib", "pickle", "skl2onnx"),
        ("net.plan", "engine of TensorRT", "the ONNX file that it was built from"),
    ],
)
def test_a_model_of_another_library_is_named_with_its_way_to_onnx(
    name: str, what: str, how: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"\x08\x01")
    path = file if file.parent == tmp_path else file.parent
    for read in (lambda: folder_at(path), lambda: guess_at(str(path))):
        with pytest.raises(BadFolder, match=f"is an? {what}.*{how.format(path)}") as said:
            read()
        assert said.value.code == "bad_model_folder"


def test_a_folder_without_a_model_toml_is_refused_with_the_models_that_lie_in_it(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"a model folder needs a model\.toml"):
        folder_at(tmp_path)
    for name in ("b.onnx", "a.pt2", "notes.txt"):
        (tmp_path / name).write_bytes(b"no")
    with pytest.raises(
        BadFolder, match=rf"but models: a\.pt2, b\.onnx; give one: `halfeven convert {tmp_path}/a\.pt2`"
    ):
        folder_at(tmp_path)


@pytest.mark.parametrize("name", ["mymodel", "bert-base-uncased", "https://example.org/net.onnx"])
def test_what_is_not_on_this_machine_is_not_looked_for_elsewhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"does not exist: .*this machine; nothing is downloaded"):
        folder_at(tmp_path / name)


def test_a_function_is_refused_with_the_command_that_writes_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    asked = f"{tmp_path}/model.py:build"
    with pytest.raises(BadFolder, match=f"`halfeven init {asked} --samples FILE`"):
        folder_at(Path(asked))
