"""``halfeven diff`` of a file with a V2 server of a faulty file: the fault is named as exactly as the server's outputs
allow."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.differing import visible_file
from halfeven.exporters.differing.diff import differences
from halfeven.exporters.differing.onnx_side import OnnxSide
from halfeven.exporters.differing.visible_file import write_visible
from halfeven.exporters.onnx.runtime import loaded
from halfeven.models.spec.datatypes import DATATYPES, name_of
from halfeven.serve.cli.main import app
from halfeven.serve.cli.v2_engine import v2_engine
from typer.testing import CliRunner

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.serve.cli.odd_server import odd

RIGHT = {
    "h": "MatMul (x, w)", "b": "Add (h, one)", "r": "Relu (b)", "e": "Exp (b)", "m": "Sub (e, r)", "y": "Tanh (m)",
}  # fmt: skip
FAULTS = {
    "h": "MatMul (x, v)", "b": "Sub (h, one)", "r": "Abs (b)", "e": "Exp (h)", "m": "Add (e, r)", "y": "Sin (m)",
}  # fmt: skip
INNER = ["h", "b", "r", "e", "m"]


def net(path: Path, faulty: str = "") -> Path:
    """A file with five inner tensors of floats, one of indices and a constant, in which another node makes ``faulty``
    than in the right file."""
    nodes = " ".join(f"{name} = {FAULTS[name] if name == faulty else RIGHT[name]}" for name in RIGHT)
    text = f"""g (float[n,8] x) => (float[n,8] y, int64[n,1] k)
        {{ one = Constant <value_float = 1.0> () {nodes} i = ArgMax <axis = 1> (r) k = Neg (i) }}"""
    weights = np.random.default_rng(4).normal(size=(2, 8, 8)).astype(np.float32) / 3
    onnx.save(parsed(text, dict(zip("wv", weights, strict=True))), path)
    return path


def visible(path: Path) -> Path:
    """The file with its inner tensors as outputs."""
    target = path.with_name(f"visible_{path.name}")
    assert write_visible(OnnxSide(path), target) == INNER
    return target


@contextmanager
def served(path: Path, shown: Collection[str] = ()) -> Iterator[str]:
    """The URL of a V2 server that has the file in ONNX Runtime as the model `net`. ``shown``: the outputs that it has;
    default: all."""
    session = loaded(path)
    names = [value.name for value in session.get_outputs() if not shown or value.name in shown]

    def described(name: str, array: np.ndarray) -> dict[str, Any]:
        return {
            "name": name, "datatype": name_of(array.dtype), "shape": array.shape, "data": array.ravel().tolist()
        }  # fmt: skip

    def infer(body: bytes) -> dict[str, Any]:
        feed = {
            one["name"]: np.array(one["data"], DATATYPES[one["datatype"]].numpy).reshape(one["shape"])
            for one in json.loads(body)["inputs"]
        }
        came = zip(names, session.run(names, feed), strict=True)
        return {"outputs": [described(name, np.asarray(array)) for name, array in came]}

    inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    outputs = [{"name": name, "datatype": "FP32", "shape": [-1, 8]} for name in names]
    model = {"name": "net", "inputs": inputs, "outputs": outputs}
    with odd({"/v2": {"extensions": []}, "/v2/models/net": model, "/v2/models/net/infer": infer}) as (url, _):
        yield url


def rows(folder: Path, dtype: type = np.float32) -> Path:
    np.savez(folder / "x.npz", x=np.random.normal(size=(6, 8)).astype(dtype))
    return folder / "x.npz"


def found(a: Path, url: str) -> dict[str, Any]:
    return differences(OnnxSide(a), v2_engine(url, "net", 10, {}), rows(a.parent))


@pytest.mark.parametrize("faulty", list(FAULTS))
def test_a_server_that_shows_all_tensors_is_wrong_at_the_node_that_is(faulty: str, tmp_path: Path) -> None:
    with served(visible(net(tmp_path / "wrong.onnx", faulty))) as url:
        facts = found(net(tmp_path / "net.onnx"), url)
    assert (facts["first"]["tensor"], facts["hidden"]) == (faulty, 0)


@pytest.mark.parametrize(
    ("faulty", "shown", "differs", "agree", "hidden"),
    [
        ("r", "yk", "y", {"x"}, 5),
        ("b", "yhm", "m", {"h"}, 3),
        ("e", "yrm", "m", {"r", "x"}, 3),
        ("m", "yer", "y", {"e", "r"}, 1),
        ("y", "ym", "y", {"m"}, 0),
    ],
)
def test_a_server_that_shows_some_tensors_is_wrong_between_two_of_them(
    faulty: str, shown: str, differs: str, agree: set[str], hidden: int, tmp_path: Path
) -> None:
    with served(visible(net(tmp_path / "wrong.onnx", faulty)), {*shown, "k"}) as url:
        facts = found(net(tmp_path / "net.onnx"), url)
    assert (facts["first"]["tensor"], set(facts["agree"]), facts["hidden"]) == (differs, agree, hidden)


def test_a_right_server_has_no_difference_in_any_tensor(tmp_path: Path) -> None:
    a = net(tmp_path / "net.onnx")
    with served(visible(a)) as url:
        facts = found(a, url)
    assert facts["equal"] and facts["tensors"] == len(RIGHT) + 1  # and k


def test_the_visible_file_declares_its_tensors_and_answers_as_before(tmp_path: Path) -> None:
    a = net(tmp_path / "net.onnx")
    written = visible(a)
    onnx.checker.check_model(onnx.load(written), full_check=True)
    outputs = {value.name: value.type.tensor_type for value in onnx.load(written).graph.output}
    assert list(outputs) == ["y", "k", *INNER]
    assert all(kind.elem_type and len(kind.shape.dim) == 2 for kind in outputs.values())
    x = {"x": np.random.normal(size=(3, 8)).astype(np.float32)}
    one, other = (np.asarray(loaded(file).run(["y"], x)[0]) for file in (a, written))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def printed(*words: object) -> tuple[int, str]:
    """The exit code, and what a person reads, in one line."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join(done.output.split())


def test_the_command_says_between_which_tensors_and_writes_the_file_that_shows_more(tmp_path: Path) -> None:
    a, wrong = net(tmp_path / "net.onnx"), net(tmp_path / "wrong.onnx", "e")
    with served(wrong) as url:
        code, said = printed("diff", a, url, "--samples", rows(tmp_path))
    assert code == 3 and "the fault is between 'x' (agrees) and 'y' (differs)" in said, said
    assert "B does not have the 5 tensors between them" in said and "halfeven diff A --visible FILE" in said
    code, said = printed("diff", wrong, "--visible", tmp_path / "all.onnx")
    assert code == 0 and "5 inner tensors as outputs" in said, said
    with served(tmp_path / "all.onnx") as url:
        code, said = printed("diff", a, url, "--samples", rows(tmp_path), "--out", tmp_path / "node")
    assert (
        code == 3
        and "the first difference is 'e', which Exp makes" in said
        and "the fault is between" not in said
    )
    assert (tmp_path / "node" / "node.onnx").is_file()


def test_a_visible_file_that_is_cut_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = net(tmp_path / "net.onnx")

    def cut_off(_: onnx.ModelProto, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError("No space left on device")

    monkeypatch.setattr(visible_file, "save", cut_off)
    with pytest.raises(OSError, match="No space left"):
        write_visible(OnnxSide(a), tmp_path / "visible.onnx")
    assert list(tmp_path.iterdir()) == [a]


def test_what_cannot_be_made_visible_or_compared_is_refused(tmp_path: Path) -> None:
    a = net(tmp_path / "net.onnx")
    program = tmp_path / "net.pt2"
    program.touch()
    for words, sentence in (
        ((a, "--visible", a), "net.onnx: expected a new file in a folder that is there"),
        ((program, "--visible", tmp_path / "v.onnx"), "expected an ONNX file as A"),
        ((tmp_path / "none.onnx", "--visible", tmp_path / "v.onnx"), "expected an ONNX file as A"),
        ((a,), "B is missing: expected halfeven diff A B --samples FILE"),
        ((a, a), "--samples FILE is missing"),
    ):
        code, _, said = run("diff", *words)
        assert code == 2 and sentence in said, said


def test_a_command_that_makes_tensors_visible_compares_nothing_and_says_so(tmp_path: Path) -> None:
    a = net(tmp_path / "net.onnx")
    for more in ((a, "--samples", tmp_path / "x.npz"), ("--dtype", "fp16")):
        code, _, said = run("diff", a, *more, "--visible", tmp_path / "visible.onnx")
        assert (
            code == 2
            and "writes a file and compares nothing" in said
            and not (tmp_path / "visible.onnx").exists()
        )


def test_a_server_is_asked_by_the_models_published_name_in_its_own_datatypes(tmp_path: Path) -> None:
    """NumPy's own numbers are FP64. The name is that of the folder for a file that is called model.onnx."""
    (tmp_path / "net").mkdir()
    a = net(tmp_path / "net" / "model.onnx")
    with served(a) as url:
        code, said = printed("diff", a, url, "--samples", rows(tmp_path, np.float64))
        assert code == 0 and "no difference" in said, said
        code, said = printed("diff", a, url, "--samples", rows(tmp_path), "--python", "python")
    assert code == 2 and "--python python: B is a server" in said, said


def test_a_batch_that_is_not_first_in_the_file_is_sent_as_the_samples_have_it(tmp_path: Path) -> None:
    state = {"name": "s", "datatype": "FP32", "shape": [2, -1, 4], "parameters": {"batch_axis": 1}}
    a, model = tmp_path / "net.onnx", {"inputs": [state], "outputs": [{**state, "name": "y"}]}
    onnx.save(parsed("g (float[2,n,4] s) => (float[2,n,4] y) { y = Neg(s) }"), a)
    np.savez(tmp_path / "s.npz", s=np.random.normal(size=(2, 3, 4)).astype(np.float32))

    def infer(body: bytes) -> dict[str, Any]:
        (one,) = json.loads(body)["inputs"]
        assert one["shape"] == [2, 3, 4]
        return {"outputs": [{**one, "name": "y", "data": [-number for number in one["data"]]}]}

    with odd({"/v2": {}, "/v2/models/net": model, "/v2/models/net/infer": infer}) as (url, _):
        code, said = printed("diff", a, url, "--samples", tmp_path / "s.npz")
    assert code == 0 and "no difference" in said, said
