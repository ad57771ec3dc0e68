"""model.toml: every documented key, its default, and what is said where one is wrong."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.errors import BadFolder
from halfeven.models.folder.package import Precision, read_folder
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, ParityLimits

from tests.model_folders import samples_of, tensor, write_folder
from tests.models.wrong_words import WRONG_WORDS, X, Y

IMAGE = tensor("x", "FP32", [-1, 1, 8, 8], picture={"color": "L"})
INF = float("inf")


def test_everything_but_name_source_inputs_and_outputs_has_the_documented_default(tmp_path: Path) -> None:
    folder = read_folder(write_folder(tmp_path / "net"))
    assert (folder.source, folder.path, folder.weights, folder.samples) == ("model.py:build", (), None, None)
    assert folder.precision == Precision("O1", "fp16", (), "keep")
    spec = folder.spec
    assert (spec.name, spec.max_batch_size, spec.form) == ("net", 64, "auto")
    assert spec.parity == ParityLimits(4.0, None, 30.0, 0.005, overridden=())
    assert spec.batching == Batching(max_queue_delay_us=0, max_queue_size=1024, buckets="auto")
    assert (spec.inputs[0].kind, spec.inputs[0].labels, spec.inputs[0].picture) == ("tensor", (), None)


def test_every_documented_key_is_read(tmp_path: Path) -> None:
    picture = {"size": [8, 8], "color": "L", "scale": 0.0625, "mean": [0.0], "std": [1]}
    written = write_folder(
        tmp_path / "repository" / "net",
        name="an.other_name-1",
        inputs=[
            tensor("image", "FP32", [-1, 1, 8, 8], picture=picture),
            tensor("tokens", "INT64", [-1, "length=2..512"]),
            tensor("state", "FP32", [2, -1, 8], batch_axis=1),
        ],
        outputs=[tensor("scores", "FP32", [-1, 2], kind="logits", labels=["no", "yes"])],
        path=[".."],
        weights="half.pth",
        max_batch_size=8,
        form="onnx",
        precision={"level": "O2", "dtype": "bf16", "keep": ["op:softmax", "a.*"], "embeddings": "half"},
        parity={"max_error_u": 8, "min_sqnr_db": 40.5, "min_slice_sqnr_db": 0, "max_flips": 0.25},
        batching={
            "max_queue_delay_us": 500,
            "max_queue_size": 1,
            "buckets": [1, 4, 8],
            "max_queue_bytes": 2,
            "max_queue_ms": 3,
            "max_batch_bytes": 4,
            "timeout_ms": 5,
            "max_request_rows": 9,
            "lengths": [8, 512],
        },
        files={"half.pth": ""},
        samples=samples_of({"image": (1, 8, 8)}),
    )
    folder = read_folder(written)
    assert folder.path == (written / "..",) and folder.weights == written / "half.pth"
    assert folder.samples == written / "samples.safetensors"
    assert folder.precision == Precision("O2", "bf16", ("op:softmax", "a.*"), "half")
    spec = folder.spec
    assert (spec.name, spec.max_batch_size, spec.form) == ("an.other_name-1", 8, "onnx")
    assert spec.inputs[0].picture == picture
    assert spec.inputs[1].shape == (Dim(), Dim(2, 512, "length"))
    assert (spec.inputs[2].shape, spec.inputs[2].batch_axis) == ((Dim(), Dim(2, 2), Dim(8, 8)), 1)
    assert (spec.outputs[0].kind, spec.outputs[0].labels) == ("logits", ("no", "yes"))
    overridden = ("max_error_u", "max_flips", "min_slice_sqnr_db", "min_sqnr_db")
    assert spec.parity == ParityLimits(8.0, 40.5, 0.0, 0.25, overridden=overridden)
    assert spec.batching == Batching(500, 1, (1, 4, 8), 2, 3, 4, 5, 9, (8, 512))
    assert Batching.from_json(spec.batching.to_json()) == spec.batching


@pytest.mark.parametrize("shape", [[-1], [-1, 1], [-1, 1, 1]])
def test_a_score_is_one_number_a_row_and_its_order_has_limits(shape: list[int], tmp_path: Path) -> None:
    parity = {"max_ties": 0.01, "max_swaps": 0, "min_top10_overlap": 1, "max_kl_nats": 0.5, "min_recall": 1}
    outputs = [tensor("y", "FP32", shape, kind="score")]
    spec = read_folder(write_folder(tmp_path / "net", outputs=outputs, parity=parity)).spec
    limits = spec.parity
    assert spec.outputs[0].kind == "score"
    assert (limits.max_ties, limits.max_swaps, limits.min_top10_overlap) == (0.01, 0.0, 1.0)
    assert limits.min_recall == 1.0
    assert limits.overridden == ("max_kl_nats", "max_swaps", "max_ties", "min_top10_overlap"), (
        "the gate's alone"
    )
    assert ModelSpec.from_json(spec.to_json()) == spec, "as the store keeps it, every limit"


def test_weights_and_samples_are_found_by_their_documented_names(tmp_path: Path) -> None:
    files = {"weights.safetensors": "", "samples.safetensors": ""}
    folder = read_folder(write_folder(tmp_path / "net", files=files))
    assert folder.weights == tmp_path / "net/weights.safetensors"
    assert folder.samples == tmp_path / "net/samples.safetensors"


def test_a_folder_of_pictures_is_samples_of_a_model_that_takes_pictures(tmp_path: Path) -> None:
    files = {"samples/1.png": ""}
    taking = read_folder(write_folder(tmp_path / "a", inputs=[IMAGE], files=files))
    assert taking.samples == tmp_path / "a/samples"
    assert read_folder(write_folder(tmp_path / "b", files=files)).samples is None
    both = write_folder(tmp_path / "c", inputs=[IMAGE], files={**files, "samples.safetensors": ""})
    assert read_folder(both).samples == tmp_path / "c/samples.safetensors"


def test_an_input_may_be_smaller_on_the_wire(tmp_path: Path) -> None:
    inputs = [
        {**X, "wire_datatype": "INT8", "wire_scale": 0.5, "wire_offset": -1},
        IMAGE | {"name": "image", "wire_datatype": "UINT8"},
        X | {"name": "plain"},
    ]
    spec = read_folder(write_folder(tmp_path / "net", inputs=inputs)).spec
    assert [t.wire for t in spec.inputs] == [Wire("INT8", 0.5, -1.0), Wire("UINT8"), None]
    assert [t.datatype for t in spec.inputs] == ["FP32"] * 3
    assert [t.datatype for t in spec.on_the_wire().inputs] == ["INT8", "UINT8", "FP32"]


@pytest.mark.parametrize(
    ("word", "level", "dtype"),
    [
        ("float32", "O0", "fp16"),
        ("mixed_float16", "O1", "fp16"),
        ("mixed_bfloat16", "O1", "bf16"),
        ("float16", "O3", "fp16"),
        ("bfloat16", "O3", "bf16"),
        *((level, level, "fp16") for level in ("O0", "O1", "O2", "O3")),
    ],
)
def test_the_level_takes_the_words_of_keras(word: str, level: str, dtype: str, tmp_path: Path) -> None:
    precision = read_folder(write_folder(tmp_path / "net", precision={"level": word})).precision
    assert (precision.level, precision.dtype) == (level, dtype)


def test_a_word_of_keras_and_a_dtype_must_mean_the_same(tmp_path: Path) -> None:
    for level, dtype in (("mixed_bfloat16", "fp16"), ("float16", "bf16"), ("bfloat16", "fp61")):
        with pytest.raises(BadFolder, match=f"{dtype}"):
            read_folder(write_folder(tmp_path / level, precision={"level": level, "dtype": dtype}))
    for level, dtype in (("mixed_bfloat16", "bf16"), ("float32", "bf16"), ("O2", "bf16")):
        folder = write_folder(tmp_path / f"{level}-same", precision={"level": level, "dtype": dtype})
        assert read_folder(folder).precision.dtype == dtype


def test_labels_may_stand_in_a_file_one_per_line(tmp_path: Path) -> None:
    outputs = [tensor("y", "FP32", [-1, 3], labels_file="words.txt")]
    folder = write_folder(tmp_path / "net", outputs=outputs, files={"words.txt": "eins\nzwei\ndrei ü\n"})
    assert read_folder(folder).spec.outputs[0].labels == ("eins", "zwei", "drei ü")


def test_without_a_batch_shapes_are_exact_and_an_output_may_be_free(tmp_path: Path) -> None:
    inputs, outputs = [tensor("x", "FP32", [4])], [tensor("y", "FP32", [-1, 3]), tensor("n", "INT64", [])]
    spec = read_folder(write_folder(tmp_path / "n", inputs=inputs, outputs=outputs, max_batch_size=0)).spec
    assert not spec.batched
    assert [t.shape for t in (*spec.inputs, *spec.outputs)] == [(Dim(4, 4),), (Dim(), Dim(3, 3)), ()]


@pytest.mark.parametrize(
    ("settings", "words"),
    WRONG_WORDS,
)
def test_an_unknown_key_or_word_is_told_with_the_file_and_the_nearest_known_one(
    settings: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    _refused(write_folder(tmp_path / "net", **settings), words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": ""}, ["name", "''"]),
        ({"name": "-x"}, ["'-x'"]),
        ({"name": "a" * 129}, ["aaa"]),
        ({"name": "net\n"}, [r"'net\n'"]),
        ({"name": 3}, ["name = 3", "a string"]),
        ({"source": "model.py"}, ["'model.py'", "model.py:build"]),
        ({"source": "model.onnx"}, ["source", "'model.onnx'", "no such file"]),
        ({"source": "program.pt2"}, ["source", "'program.pt2'", "no such file"]),
        ({"source": "model.onnx:build"}, ["'model.onnx:build'", "'model.py:build'", "'hf:.'"]),
        ({"source": "hf:"}, ["'hf:'", "no config.json", "local transformers folder"]),
        ({"source": "hf:bert-base-uncased"}, ["'hf:bert-base-uncased'", "no name of a hub"]),
        ({"source": "nothing.py:build"}, ["source", "'nothing.py'", "no such file"]),
        ({"path": ".."}, ["path", "list of strings"]),
        ({"path": ["../nowhere"]}, ["path", "'../nowhere'", "no such folder"]),
        ({"weights": "nowhere.safetensors"}, ["weights", "'nowhere.safetensors'", "no such file"]),
        ({"max_batch_size": -1}, ["max_batch_size = -1", "from 0 to 65536"]),
        ({"max_batch_size": "8"}, ["max_batch_size = '8'", "a whole number"]),
        ({"max_batch_size": True}, ["max_batch_size = True", "a whole number"]),
        ({"max_batch_size": 1.5}, ["max_batch_size = 1.5", "a whole number"]),
        ({"form": 3}, ["form = 3"]),
        ({"precision": {"level": 1}}, ["precision.level = 1", "a string"]),
        ({"precision": {"keep": "op:softmax"}}, ["precision.keep", "a list"]),
        ({"precision": {"keep": [3]}}, ["precision.keep", "list of strings"]),
        ({"precision": "O1"}, ["[precision]", "a table"]),
        ({"parity": {"max_error_u": float("inf")}}, ["[parity] max_error_u = inf", "finite"]),
        ({"parity": {"max_flips": float("nan")}}, ["[parity] max_flips = nan", "from 0 to 1"]),
        ({"parity": {"min_sqnr_db": -1.0}}, ["[parity] min_sqnr_db = -1.0", "at least 0"]),
        ({"parity": {"max_ties": 1.5}}, ["[parity] max_ties = 1.5", "from 0 to 1"]),
        ({"parity": {"max_swaps": 2.0}}, ["[parity] max_swaps = 2.0", "from 0 to 1"]),
        ({"parity": {"min_top10_overlap": 9.0}}, ["min_top10_overlap = 9.0", "from 0 to 1"]),
        ({"parity": {"min_recall": 1.5}}, ["[parity] min_recall = 1.5", "from 0 to 1"]),
        ({"outputs": [{**Y, "kind": "score"}]}, ["kind = 'score'", "one floating number a row", "[-1,3]"]),
        ({"outputs": [tensor("y", "FP32", [-1, -1], kind="score")]}, ["kind = 'score'", "[-1,-1]"]),
        ({"outputs": [tensor("y", "INT64", [-1], kind="score")]}, ["kind = 'score'", "INT64"]),
        ({"parity": {"max_error_u": "4"}}, ["parity.max_error_u = '4'", "a number"]),
        ({"parity": {"max_error_u": True}}, ["parity.max_error_u = True", "a number"]),
        ({"batching": {"max_queue_delay_us": -1}}, ["[batching] max_queue_delay_us", "at least 0"]),
        ({"batching": {"max_queue_size": 0}}, ["[batching] max_queue_size", "at least 1"]),
        ({"batching": {"max_queue_bytes": 0}}, ["[batching] max_queue_bytes", "at least 1"]),
        ({"batching": {"timeout_ms": -1}}, ["[batching] timeout_ms", "at least 0"]),
        ({"batching": {"timeout": 3}}, ["[batching]", "'timeout_ms'"]),
        ({"batching": {"max_request_rows": 63}}, ["max_request_rows = 63", "at least max_batch_size (64)"]),
        ({"batching": {"max_queue_size": 1.5}}, ["batching.max_queue_size = 1.5", "a whole number"]),
        ({"batching": {"buckets": "powers"}}, ["[batching] buckets = 'powers'", "'auto'", "[1, 2, 4, 8]"]),
        ({"batching": {"buckets": [1, True]}}, ["[batching] buckets = [1, True]", "numbers of rows"]),
        ({"batching": {"buckets": [0, 2]}}, ["[batching] buckets = [0, 2]", "numbers of rows"]),
        ({"batching": {"buckets": [4, 2]}}, ["[batching] buckets = [4, 2]", "ascending"]),
        ({"batching": {"buckets": [2, 2]}}, ["[batching] buckets = [2, 2]", "ascending"]),
        ({"batching": {"buckets": [1, 65]}}, ["[batching] buckets", "at most max_batch_size (64)"]),
        ({"batching": {"lengths": "auto"}}, ["[batching] lengths = 'auto'", "sizes of an axis"]),
        ({"batching": {"lengths": [16, 8]}}, ["[batching] lengths = [16, 8]", "ascending"]),
        ({"batching": {"bucket": [1]}}, ["[batching]", "'bucket'", "'buckets'"]),
        ({"batching": 3}, ["batching", "a table"]),
        ({"inputs": []}, ["'inputs' is missing"]),
        ({"inputs": [X, X]}, ["[[inputs]]", "'x'", "twice"]),
        ({"inputs": [tensor("", "FP32", [-1])]}, ["inputs[0].name", "empty"]),
        ({"inputs": [{"name": "x", "shape": [-1]}]}, ["'inputs[0].datatype' is missing"]),
        ({"inputs": [{"name": "x", "datatype": "FP32"}]}, ["'inputs[0].shape' is missing"]),
        ({"inputs": [tensor("x", "FP32", [-1, "2..1"])]}, ["inputs[0].shape", "'2..1'"]),
        ({"inputs": [tensor("x", "FP32", [])]}, ["inputs[0].shape", "first axis is the batch"]),
        ({"inputs": [tensor("x", "FP32", [8, 4])]}, ["first axis is the batch", "max_batch_size = 0"]),
        ({"inputs": [{**X, "batch_axis": 1}]}, ["inputs[0].shape = [-1, 4]", "axis 1 is the batch", "free"]),
        ({"inputs": [{**X, "batch_axis": 2}]}, ["inputs[0].batch_axis = 2", "counted from 0 (0 to 1)"]),
        ({"outputs": [{**Y, "batch_axis": -1}]}, ["outputs[0].batch_axis = -1", "(0 to 1)"]),
        ({"inputs": [{**X, "batch_axis": "1"}]}, ["inputs[0].batch_axis = '1'", "a whole number"]),
        ({"inputs": [{**X, "batch_axis": 1}], "max_batch_size": 0}, ["batch_axis = 1", "not batched"]),
        (
            {"inputs": [IMAGE | {"batch_axis": 1}]},
            ["batch_axis = 1", "pictures have the batch as their first"],
        ),
        ({"inputs": [tensor("x", "FP32", [-1] * 17)]}, ["inputs[0].shape", "at most 16"]),
        ({"outputs": [{**Y, "labels": "a b c"}]}, ["outputs[0].labels", "list of strings"]),
        ({"outputs": [{**Y, "labels_file": "no.txt"}]}, ["outputs[0].labels_file", "'no.txt'"]),
        ({"outputs": [{**Y, "labels_file": "model.py", "labels": ["a"]}]}, ["labels and labels_file"]),
        ({"inputs": [{**X, "picture": "L"}]}, ["inputs[0].picture", "a table"]),
        ({"inputs": [{**X, "picture": {"size": [8]}}]}, ["picture.size", "[height, width]"]),
        ({"inputs": [{**X, "picture": {"mean": ["0"]}}]}, ["picture.mean", "a number per channel"]),
        ({"inputs": [{**X, "picture": {"scale": "1"}}]}, ["picture.scale", "a number"]),
        ({"inputs": [{**X, "picture": {}}]}, ["inputs[0].picture", "no place for 3 channels"]),
        ({"outputs": [{**Y, "kind": "image"}]}, ["outputs[0].picture", "no place for 1 channel"]),
        ({"inputs": [{**X, "wire_scale": 2}]}, ["inputs[0].wire_scale", "without wire_datatype"]),
        ({"inputs": [{**X, "wire_datatype": "UINT9"}]}, ["inputs[0].wire_datatype", "'UINT8'"]),
        ({"inputs": [{**X, "wire_datatype": "INT64"}]}, ["inputs[0].wire_datatype", "a smaller one"]),
        ({"inputs": [{**X, "wire_datatype": "INT8", "wire_scale": 0}]}, ["wire_scale = 0.0", "not 0"]),
        ({"inputs": [{**X, "wire_datatype": "INT8", "wire_offset": INF}]}, ["wire_offset = inf", "finite"]),
        ({"inputs": [{**X, "wire_datatype": "INT8", "wire_ofset": 1}]}, ["'wire_ofset'", "'wire_offset'"]),
        ({"inputs": [IMAGE | {"wire_datatype": "FP16"}]}, ["inputs[0]", "wire_datatype = 'UINT8' alone"]),
        ({"inputs": [IMAGE | {"wire_datatype": "UINT8", "wire_scale": 1}]}, ["'UINT8' alone"]),
        ({"outputs": [{**Y, "wire_datatype": "FP16"}]}, ["outputs[0].wire_datatype", "on an input"]),
    ],
)
def test_a_wrong_value_is_told_with_file_key_what_came_and_what_was_expected(
    settings: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    _refused(write_folder(tmp_path / "net", **settings), words)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("model.py:build", "python"),
        ("program.pt2", "program"),
        ("model.onnx", "onnx"),
        ("hf:.", "hf"),
        ("hf:sub/bert", "hf"),
    ],
)
def test_a_source_is_of_one_of_four_kinds(source: str, kind: str, tmp_path: Path) -> None:
    names = ("program.pt2", "model.onnx", "config.json", "model.safetensors")
    files = dict.fromkeys((*names, *(f"sub/bert/{name}" for name in names)), "")
    folder = read_folder(write_folder(tmp_path / "net", source=source, files=files))
    assert (folder.source, folder.kind) == (source, kind)
    inside = tmp_path / "net" / source.removeprefix("hf:")
    of_hf = (inside / "config.json", inside / "model.safetensors")
    assert folder.source_files == (of_hf if kind == "hf" else (tmp_path / "net" / source.partition(":")[0],))


def test_pickled_weights_make_no_transformers_folder(tmp_path: Path) -> None:
    files = {"config.json": "{}", "pytorch_model.bin": ""}
    _refused(
        write_folder(tmp_path / "net", source="hf:.", files=files), ["*.safetensors", "no pickled weights"]
    )


@pytest.mark.parametrize("key", ["name", "source", "inputs", "outputs"])
def test_the_four_keys_without_default_must_be_there(key: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net")
    text = (folder / "model.toml").read_text()
    pattern = rf"^{key} = .*\n" if key in ("name", "source") else rf"^\[\[{key}\]\]\n(.+\n)*"
    text, replaced = re.subn(pattern, "", text, count=1, flags=re.MULTILINE)
    (folder / "model.toml").write_text(text)
    assert replaced == 1
    _refused(folder, [f"'{key}' is missing"])


def test_a_file_that_is_not_there_or_not_toml_or_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _refused(tmp_path / "empty", ["does not exist", "needs a model.toml"])
    _refused(write_folder(tmp_path / "torn", extra_toml="[precision\n"), ["cannot be read", "line"])
    folder = write_folder(tmp_path / "bytes")
    (folder / "model.toml").write_bytes(b"name = '\xff'")
    _refused(folder, ["cannot be read"])


def test_weights_that_are_no_file_name_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", weights="model.py")
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(text.replace('weights = "model.py"', "weights = 3"))
    _refused(folder, ["weights = 3", "a file name"])


def test_labels_that_are_not_text_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", outputs=[{**Y, "labels_file": "labels.txt"}])
    (folder / "labels.txt").write_bytes(b"\xff\xfe\x00")
    _refused(folder, ["outputs[0].labels_file", "UTF-8"])


def test_reading_a_folder_runs_none_of_it(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    read_folder(write_folder(tmp_path / "net", f"open({str(canary)!r}, 'w').close()\ndef build(): ...\n"))
    assert not canary.exists()


def _refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(BadFolder) as caught:
        read_folder(folder)
    message = str(caught.value)
    assert all(word in message for word in [str(folder.resolve() / "model.toml"), *words]), message


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(
        f'''name = "a"\nsource = "{"m" * 5000}.py:build"\ninputs = [{{ name = "x", datatype = "FP32", shape = [-1] }}]
outputs = [{{ name = "y", datatype = "FP32", shape = [-1] }}]'''
    )
    with pytest.raises(BadFolder, match=r"model\.toml names what cannot be looked at: File name too long"):
        read_folder(tmp_path)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000], ids=["nested too deep", "too many digits"])
def test_values_that_the_reader_of_toml_gives_up_on_are_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(f"name = {value}")
    with pytest.raises(BadFolder, match=r"model\.toml cannot be read"):
        read_folder(tmp_path)


def test_labels_and_weights_lie_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("one\ntwo\nthree\n")
    folder = write_folder(tmp_path / "net", outputs=[{**Y, "labels_file": "labels.txt"}])
    (folder / "labels.txt").symlink_to(tmp_path / "secret.txt")
    _refused(folder, ["outputs[0].labels_file", "leads out of the folder net"])
    for place in ("../secret.txt", str(tmp_path / "secret.txt")):
        folder = write_folder(tmp_path / "net", outputs=[{**Y, "labels_file": place}])
        _refused(folder, ["outputs[0].labels_file", "outside of the folder"])
    folder = write_folder(tmp_path / "net", weights="../secret.txt")
    _refused(folder, ["weights", "outside of the folder"])


def test_a_pipe_in_the_place_of_a_model_toml_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net")
    (folder / "model.toml").unlink()
    os.mkfifo(folder / "model.toml")
    _refused(folder, ["model.toml", "not a regular file"])
