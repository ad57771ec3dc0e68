"""A Triton repository becomes model folders under the signature of config.pbtxt; what is not taken over is named."""

import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.exporters.importing import triton
from halfeven.exporters.importing.imported import Refusal, Written
from halfeven.exporters.importing.triton import take_repository
from halfeven.models.errors import Unforeseen
from halfeven.models.folder.package import read_folder
from halfeven.models.store.store import Store

from tests.command_line import run
from tests.exporters.importing.server_files import triton_model
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.small_files import mlp
from tests.exporters.onnx.traps import normal
from tests.real.asking import CLOSE, asked_over_http

X = 'input { name: "x" data_type: TYPE_FP32 dims: 8 }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: 4 }'
BATCHED = f'backend: "onnxruntime" max_batch_size: 16 {X} {Y}'


def taken(repository: Path, out: Path) -> list[Written | Refusal]:
    return list(take_repository(repository, out, overwrite=False))


def written(
    tmp_path: Path, config: str | None, model: onnx.ModelProto | None = None
) -> tuple[dict[str, Any], Written]:
    triton_model(tmp_path / "repository/net", config, {"1": model or mlp()})
    (one,) = taken(tmp_path / "repository", tmp_path / "out")
    assert isinstance(one, Written), one
    return tomllib.loads((one.folder / "model.toml").read_text()), one


def refused(tmp_path: Path, config: str | None, model: onnx.ModelProto | None = None) -> str:
    triton_model(tmp_path / "repository/net", config, {"1": model or mlp()})
    (one,) = taken(tmp_path / "repository", tmp_path / "out")
    assert isinstance(one, Refusal) and not (tmp_path / "out").exists()
    return str(one.error)


def test_names_sizes_batch_and_queue_are_those_of_the_configuration(tmp_path: Path) -> None:
    more = """dynamic_batching { max_queue_delay_microseconds: 100
        default_queue_policy { max_queue_size: 32 default_timeout_microseconds: 1500 } }"""
    toml, one = written(tmp_path, BATCHED + more)
    assert (toml["name"], toml["source"], toml["max_batch_size"]) == ("net", "model.onnx", 16)
    assert toml["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    assert toml["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]
    assert toml["batching"] == {"max_queue_delay_us": 100, "max_queue_size": 32, "timeout_ms": 2}
    assert one.left == () and "confirm: " not in (one.folder / "model.toml").read_text()


def test_a_size_that_the_file_leaves_free_is_fixed_as_the_configuration_has_it(tmp_path: Path) -> None:
    model = parsed("g (float[n,t] x) => (float[n,t] y) { y = Relu(x) }")
    toml, _ = written(tmp_path, BATCHED.replace("dims: 4", "dims: 8"), model)
    assert toml["inputs"][0]["shape"] == [-1, 8] == toml["outputs"][0]["shape"]


def test_without_a_batch_all_sizes_are_in_the_dims(tmp_path: Path) -> None:
    toml, _ = written(tmp_path, BATCHED.replace("16", "0").replace("dims: ", "dims: [-1] dims: "))
    assert toml["max_batch_size"] == 0 and toml["inputs"][0]["shape"] == ["n", 8]


@pytest.mark.parametrize("config", [None, "", 'platform: "onnxruntime_onnx"'])
def test_what_the_configuration_does_not_state_is_read_from_the_file(
    config: str | None, tmp_path: Path
) -> None:
    toml, one = written(tmp_path, config)
    assert toml["max_batch_size"] > 0 and toml["inputs"][0]["shape"] == [-1, 8]
    assert any(line.startswith("  to confirm: max_batch_size") for line in one.lines())


def test_without_max_batch_size_dims_may_leave_the_batch_out_as_triton_completes_them(tmp_path: Path) -> None:
    toml, _ = written(tmp_path, f'backend: "onnxruntime" {X} {Y}')
    assert toml["max_batch_size"] > 1 and toml["inputs"][0]["shape"] == [-1, 8]


def test_where_the_file_has_no_batch_dims_may_not_leave_it_out(tmp_path: Path) -> None:
    model = parsed("g (float[n,8] x) => (float[8,8] y) { y = MatMul(t, x) t = Transpose(x) }")
    assert "state max_batch_size: 0" in refused(tmp_path, f'backend: "onnxruntime" {X}', model)


def test_outputs_that_the_configuration_leaves_out_are_not_served(tmp_path: Path) -> None:
    model = parsed("g (float[n,8] x) => (float[n,8] y, float[n,8] z) { y = Relu(x) z = Tanh(x) }")
    toml, _ = written(tmp_path, BATCHED.replace("dims: 4", "dims: 8"), model)
    assert [tensor["name"] for tensor in toml["outputs"]] == ["y"]


def test_labels_stand_in_model_toml(tmp_path: Path) -> None:
    labels = ['a"b', "ä\x7f\u2028", "", "d"]
    folder = tmp_path / "repository/net"
    triton_model(folder, BATCHED.replace("dims: 4", 'dims: 4 label_filename: "labels.txt"'), {"1": mlp()})
    (folder / "labels.txt").write_text("\r\n".join(labels) + "\r\n", encoding="utf-8", newline="")
    (one,) = taken(folder, tmp_path / "out")
    assert isinstance(one, Written) and one.guess.spec.outputs[0].labels == tuple(labels)
    assert tomllib.loads((one.folder / "model.toml").read_text())["outputs"][0]["labels"] == labels


def test_every_field_that_is_not_taken_over_is_named_and_defaults_are_not(tmp_path: Path) -> None:
    more = """instance_group [ { count: 2 kind: KIND_GPU } ] sequence_batching { }
        model_transaction_policy { decoupled: false } response_cache { enable: false } new_of_triton: 1
        dynamic_batching { preferred_batch_size: [ 4, 8 ] preserve_ordering: true }
        parameters { key: "a" value: { string_value: "b" } }"""
    config = BATCHED.replace("dims: 8", "dims: 8 optional: true format: FORMAT_NONE") + more
    _, one = written(tmp_path, config)
    assert [line.partition(":")[0] for line in one.left] == [
        "input 'x'",
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.preserve_ordering",
        "instance_group",
        "sequence_batching",
        "new_of_triton",
        "parameters",
    ]
    text = (one.folder / "model.toml").read_text()
    assert all(f"# not taken over: {line}\n" in text for line in one.left)
    assert all(f"  not taken over: {line}" in one.lines() for line in one.left)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", ["net"]),
        ("version_policy { latest { num_versions: 2 } }", ["net/2", "net/10"]),
        ("version_policy { all { } }", ["net/1", "net/2", "net/10"]),
        ("version_policy { specific { versions: [1, 10, 11] } }", ["net/1", "net/10"]),
    ],
)
def test_the_versions_that_the_policy_serves_get_a_folder_each(
    policy: str, expected: list[str], tmp_path: Path
) -> None:
    versions = {number: mlp(seed=int(number)) for number in ("1", "2", "10")}
    folder = triton_model(tmp_path / "net", BATCHED + policy, {**versions, "old": mlp(), "03": mlp()})
    found = taken(folder, tmp_path / "out")
    assert all(isinstance(one, Written) for one in found)
    assert [
        str(one.folder.relative_to(tmp_path / "out")) for one in found if isinstance(one, Written)
    ] == expected
    last, left = found[-1], " ".join(found[-1].left if isinstance(found[-1], Written) else ())
    assert isinstance(last, Written)
    assert (last.folder / "model.onnx").read_bytes() == (folder / "10/model.onnx").read_bytes()
    assert "folder 'old'" in left and "folder '03'" in left
    assert ("version 1: version_policy" in left) == ("net/1" not in expected)
    assert ("version 11: it is not there" in left) == ("11" in policy)


def test_a_file_of_another_name_and_one_with_its_data_beside_it_are_found(tmp_path: Path) -> None:
    inside = tmp_path / "net/1/model.onnx"
    inside.mkdir(parents=True)
    onnx.save_model(
        mlp(), inside / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    (one,) = taken(tmp_path / "net", tmp_path / "out")
    assert isinstance(one, Written)
    assert {file.name for file in one.folder.iterdir()} == {"model.toml", "model.onnx", "w.bin"}
    other = triton_model(tmp_path / "other", 'default_model_filename: "a.onnx"', {"1": mlp()})
    (other / "1/model.onnx").rename(other / "1/a.onnx")
    (one,) = taken(other, tmp_path / "out")
    assert isinstance(one, Written) and one.guess.source == "a.onnx"


@pytest.mark.parametrize("name", ["net.bin", "net.pt2", "a:b.onnx", "net.ONNX"])
def test_a_file_whose_name_is_none_of_an_onnx_file_gets_one(tmp_path: Path, name: str) -> None:
    folder = triton_model(tmp_path / "net", f'backend: "onnxruntime" default_model_filename: "{name}"', {})
    (folder / "1").mkdir()
    onnx.save_model(
        mlp(), folder / "1" / name, save_as_external_data=True, location="w.data", size_threshold=0
    )
    (one,) = taken(folder, tmp_path / "out")
    assert isinstance(one, Written), one
    assert {file.name for file in one.folder.iterdir()} == {"model.toml", "model.onnx", "w.data"}
    assert read_folder(one.folder).source == "model.onnx"


@pytest.mark.parametrize("fault", ["in the model", "in its place"])
def test_where_one_version_is_refused_none_is_written(tmp_path: Path, fault: str) -> None:
    folder = triton_model(
        tmp_path / "net", BATCHED + "version_policy { all { } }", {"1": mlp(), "2": mlp(seed=2)}
    )
    whole, place = (folder / "2/model.onnx").read_bytes(), tmp_path / "out/net/2"
    (folder / "2/model.onnx").write_bytes(b"no" if fault == "in the model" else whole)
    if fault == "in its place":
        place.mkdir(parents=True)
        (place / "model.toml").write_text("mine")
    (one,) = taken(folder, tmp_path / "out")
    assert isinstance(one, Refusal) and not (tmp_path / "out/net/1").exists()
    (folder / "2/model.onnx").write_bytes(whole)
    (place / "model.toml").unlink(missing_ok=True)
    assert len([one for one in taken(folder, tmp_path / "out") if isinstance(one, Written)]) == 2


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (BATCHED.replace("dims: 8", "dims: 9"), "for input 'x', the file has [-1, 8]"),
        (BATCHED.replace("16", "0"), "says [8] for input 'x', the file has [-1, 8]"),
        (BATCHED.replace("TYPE_FP32", "TYPE_INT64"), "says INT64 for input 'x', the file has FP32"),
        (BATCHED.replace('"x"', '"z"'), "has the input 'z'"),
        (BATCHED.replace("16", "-1"), "expected 0"),
        (BATCHED.replace("16", '"16"'), "max_batch_size: '16': expected a whole number"),
        (BATCHED.replace("onnxruntime", "python"), "its back end is 'python'"),
        (BATCHED.replace("onnxruntime", "mine"), "expected onnxruntime: write the model as ONNX"),
        ('platform: "ensemble" ensemble_scheduling { step { model_name: "a" } step { model_name: "b" } }', "(a, b)"),
        (BATCHED.replace("dims: 4", 'dims: 4 label_filename: "../net/config.pbtxt"'), "inside the model's folder"),
        (BATCHED.replace("dims: 4", 'dims: 4 label_filename: "none.txt"'), "expected the labels of output 'y'"),
        (f'{BATCHED} default_model_filename: "/etc/passwd"', "inside the model's folder"),
        (f'{BATCHED} default_model_filename: "a.onnx"', "expected the model in a.onnx, which is not there"),
        (f"{BATCHED} version_policy {{ specific {{ versions: 7 }} }}", "has no version to take"),
        ("name: {", ":1: expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused_with_its_reason_and_nothing_is_written(
    config: str, fault: str, tmp_path: Path
) -> None:
    assert fault in refused(tmp_path, config)


def test_a_batch_that_the_file_does_not_have_is_refused(tmp_path: Path) -> None:
    model = parsed("g (float[n,8] x) => (float[8,n] y) { y = Transpose<perm=[1,0]>(x) }")
    said = refused(tmp_path, BATCHED.replace("dims: 4", "dims: -1"), model)
    assert "not every tensor has exactly one axis with a place for each row" in said


@pytest.mark.parametrize(
    ("file", "way"),
    [("model.pt", "export that one"), ("model.plan", "one kind of GPU"), ("model.py", "halfeven init")],
)
def test_a_file_of_another_back_end_is_refused_with_the_way_out(file: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "net/1").mkdir(parents=True)
    (tmp_path / "net/1" / file).write_bytes(b"")
    (one,) = taken(tmp_path / "net", tmp_path / "out")
    assert isinstance(one, Refusal) and way in str(one.error)


def test_a_refused_model_does_not_stop_the_others_and_the_command_names_both(tmp_path: Path) -> None:
    triton_model(tmp_path / "repository/good", None, {"1": mlp()})
    triton_model(tmp_path / "repository/torn", None, {"1": mlp()})
    (tmp_path / "repository/torn/1/model.onnx").write_bytes(b"no")
    code, facts, said = run("import", tmp_path / "repository", tmp_path / "out")
    assert code == 0, said
    assert [model["model"] for model in facts["models"]] == ["good"]
    assert [one["model"] for one in facts["refused"]] == ["torn"] and "not an ONNX" in facts["refused"][0][
        "reason"
    ]
    code, facts, said = run("import", tmp_path / "repository/good", tmp_path / "out")
    assert code == 2 and "--force" in said
    assert run("import", tmp_path / "repository/good", tmp_path / "out", "--force")[0] == 0


def test_a_path_that_is_neither_is_refused(tmp_path: Path) -> None:
    code, _, said = run("import", tmp_path, tmp_path / "out")
    assert code == 2 and "Triton model repository" in said


@pytest.mark.slow
def test_what_was_imported_converts_and_answers_as_the_file_does(tmp_path: Path) -> None:
    """Two versions of one model: each becomes a version in the store, the last is active."""
    x = normal(np.random.default_rng(), 3, 8).astype(np.float32)
    folder = triton_model(
        tmp_path / "repository/net",
        BATCHED + "version_policy { all { } }",
        {"1": mlp(seed=1), "4": mlp(seed=2)},
    )
    code, facts, said = run("import", tmp_path / "repository", tmp_path / "out")
    assert code == 0, said
    for model in facts["models"]:
        code, _, said = run("convert", model["folder"], "--store", tmp_path / "store")
        assert code == 0, said
    store = Store(tmp_path / "store")
    assert store.numbers("net") == [1, 2]
    session = onnxruntime.InferenceSession(folder / "4/model.onnx", providers=["CPUExecutionProvider"])
    expected = np.asarray(session.run(None, {"x": x})[0])
    answer = asked_over_http(store, store.version("net", 2).spec(), {"x": x})["y"]
    assert np.allclose(answer, expected, atol=CLOSE * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    "linked", ["labels", "the configuration", "the model", "a version", "the whole model"]
)
def test_no_link_out_of_the_repository_is_followed(tmp_path: Path, linked: str) -> None:
    """A file outside the repository is somebody else's: its text would become labels that callers read."""
    config = BATCHED.replace("dims: 4", 'dims: 4 label_filename: "labels.txt"')
    model = triton_model(tmp_path / "repository/net", config, {"1": mlp()})
    (model / "labels.txt").write_text("a\nb\nc\nd\n")
    place = {
        "labels": model / "labels.txt",
        "the configuration": model / "config.pbtxt",
        "the model": model / "1/model.onnx",
        "a version": model / "1",
        "the whole model": model,
    }[linked]
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    (one,) = taken(tmp_path / "repository", tmp_path / "out")
    assert isinstance(one, Refusal) and "leads out of the folder repository" in str(one.error)
    assert not (tmp_path / "out").exists()


def test_a_link_inside_of_the_repository_is_followed(tmp_path: Path) -> None:
    model = triton_model(tmp_path / "repository/net", BATCHED, {"1": mlp()})
    (model / "1/model.onnx").rename(tmp_path / "repository/shared.onnx")
    (model / "1/model.onnx").symlink_to("../../shared.onnx")
    (one,) = taken(tmp_path / "repository", tmp_path / "out")
    assert isinstance(one, Written), one
    assert not (one.folder / "model.onnx").is_symlink()


@pytest.mark.parametrize("name", ["labels.txt", "config.pbtxt", "1/model.onnx"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    config = BATCHED.replace("dims: 4", 'dims: 4 label_filename: "labels.txt"')
    model = triton_model(tmp_path / "repository/net", config, {"1": mlp()})
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    (one,) = taken(tmp_path / "repository", tmp_path / "out")
    assert isinstance(one, Refusal) and name.split("/")[-1] in str(one.error)


@pytest.mark.parametrize(
    "config",
    [
        BATCHED.replace("dims: 8", "dims: 9223372036854775808"),
        BATCHED.replace("dims: 8", f"dims: 0x{'f' * 5000}"),
        BATCHED.replace("dims: 8", f"dims: {'9' * 5000}"),
        BATCHED.replace("dims: 8", "dims: [" + ", ".join(["1"] * 1001) + "]"),
        BATCHED + "dynamic_batching { max_queue_delay_microseconds: 18446744073709551615 }",
        BATCHED + f"version_policy {{ latest {{ num_versions: {2**63} }} }}",
        BATCHED + f"version_policy {{ specific {{ versions: {'1' + '0' * 4000} }} }}",
    ],
)
def test_huge_numbers_and_ranks_are_refused_with_words_of_their_own(tmp_path: Path, config: str) -> None:
    triton_model(tmp_path / "repository/net", config, {"1": mlp()})
    (one,) = taken(tmp_path / "repository", tmp_path / "out")
    assert isinstance(one, Refusal) and not isinstance(one.error, Unforeseen), one
    assert len(str(one.error)) < 1000


def test_what_the_import_did_not_foresee_is_that_model_s_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("net", "other"):
        triton_model(tmp_path / "repository" / name, BATCHED, {"1": mlp()})
    guess = triton.guess_onnx

    def guessed(path: Path, *more: Any) -> Any:
        if "other" in path.parts:
            raise ZeroDivisionError("of a file like no other")
        return guess(path, *more)

    monkeypatch.setattr(triton, "guess_onnx", guessed)
    first, second = taken(tmp_path / "repository", tmp_path / "out")
    assert isinstance(first, Written) and isinstance(second, Refusal)
    assert isinstance(second.error, Unforeseen) and "repository/other cannot be read" in str(second.error)
