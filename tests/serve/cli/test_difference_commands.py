"""``halfeven diff`` and ``halfeven index-check``: their answers and exit codes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.models.order.one_order import MEMORY_SETTING, private_bytes

from tests.command_line import run
from tests.exporters.half_files.onnx_net import samples, written
from tests.exporters.onnx.onnx_files import parsed
from tests.model_folders import LINEAR, samples_of, tensor, write_folder

pytestmark = pytest.mark.slow  # processes of their own


def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    net, rows = written(tmp_path / "net.onnx"), samples(tmp_path / "x.npz")
    code, facts, said = run("diff", net, net, "--samples", rows)
    assert code == 0 and facts["equal"] and facts["tensors"] == 3
    other = written(tmp_path / "other.onnx", loud=1.5)
    code, facts, said = run("diff", net, other, "--samples", rows, "--out", tmp_path / "node")
    assert code == 3 and facts["first"]["tensor"] == "h" and (tmp_path / "node" / "node.onnx").is_file()
    code, _, said = run("diff", net, net, "--samples", rows, "--dtype", "fp8")
    assert code == 2 and "expected one of fp32, fp16, bf16" in said


def test_a_wrong_option_is_named_before_anything_is_compared(tmp_path: Path) -> None:
    net, rows = written(tmp_path / "net.onnx"), samples(tmp_path / "x.npz")
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'onnxruntime'\" >&2\nexit 1\n")
    lacking.chmod(0o755)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    for wrong, sentence in (
        ((net, "--out", tmp_path / "full"), "full is not an empty folder: expected a new or an empty one"),
        ((net, "--out", net / "node"), "net.onnx is not a folder that you may write to"),
        (
            (net, "--python", lacking),
            "python has no onnxruntime: expected an environment with numpy and onnx",
        ),
        ((net, "--python", tmp_path), "cannot be started (Permission denied): expected the python"),
        (("ftp://host:9/",), "B 'ftp://host:9/': expected http://HOST:PORT"),
    ):
        code, _, said = run("diff", net, *wrong, "--samples", rows)
        assert code == 2 and sentence in said and "--against" not in said, said


def test_a_file_that_asks_for_too_much_memory_is_ended_by_the_bound_of_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """g (float[n,3] x) => (float[n,3] y) {
        big = ConstantOfShape (size) m = ReduceMax <keepdims=0> (big) y = Add (x, m)
    }"""
    net = parsed(text, {"size": np.array([1 << 31], np.int64)})
    onnx.save(net, tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((4, 3), np.float32))
    monkeypatch.setenv(MEMORY_SETTING, str((private_bytes() >> 20) + 1024))
    code, _, said = run("diff", tmp_path / "net.onnx", tmp_path / "net.onnx", "--samples", tmp_path / "x.npz")
    assert code == 4 and MEMORY_SETTING in said


def test_a_difference_in_a_body_is_reported_without_its_node(tmp_path: Path) -> None:
    rows = tmp_path / "x.npz"
    np.savez(rows, x=np.ones((4, 3), np.float32))
    for name, op in (("a", "Exp"), ("b", "Neg")):
        text = f"""g (float[n,3] x) => (float[n,3] y) {{
            most = ReduceMax <keepdims=0> (x) small = Less (most, limit)
            y = If (small) <
                then_branch = then () => (float[n,3] one) {{ one = {op} (x) }},
                else_branch = other () => (float[n,3] two) {{ two = Abs (x) }} >
        }}"""
        onnx.save(parsed(text, {"limit": np.array(9, np.float32)}), tmp_path / f"{name}.onnx")
    asked = ("diff", tmp_path / "a.onnx", tmp_path / "b.onnx", "--samples", rows)
    code, facts, said = run(*asked, "--out", tmp_path / "node")
    assert code == 3 and facts["first"]["tensor"] == "y" and facts["reproduction"] is None, said
    assert "has a body, which is not written alone" in facts["not_written"]
    assert not (tmp_path / "node").exists()


def test_a_program_is_compared_with_its_file_and_a_version_with_its_half(tmp_path: Path) -> None:
    """The model file, its exported program, the ONNX form; and under another Python."""
    folder = write_folder(tmp_path / "net", LINEAR, samples=samples_of({"x": [4]}, 24, seed=1))
    store = ("--store", tmp_path / "store")
    assert run("convert", folder, *store)[0] == 0
    rows = ("--samples", folder / "samples.safetensors", *store)
    for a, b in ((folder, "net"), ("net@1", folder)):
        code, facts, said = run("diff", a, b, *rows, "--python", sys.executable)
        assert code == 0 and facts["tensors"], said
    code, facts, said = run("diff", folder, "net", *rows, "--dtype", "fp32", "--out", tmp_path / "node")
    assert code == 3 and facts["first"]["op"] == "linear" and (tmp_path / "node" / "node.py").is_file(), said
    subprocess.run([sys.executable, "node.py"], cwd=tmp_path / "node", check=True)
    code, facts, said = run("diff", folder, f"{folder}/model.py:build", *rows)
    assert code == 0 and facts["tensors"] == 3, said
    x = np.random.normal(size=(6, 4))  # FP64, as NumPy makes them
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "z.npz", z=x)
    for file, expected, sentence in (("x.npz", 0, ""), ("z.npz", 2, "expected the inputs ['x'] of 'net'")):
        code, _, said = run("diff", folder, "net", "--samples", tmp_path / file, *store)
        assert code == expected and sentence in said, said
    code, _, said = run("diff", folder, "other", *rows)
    assert code == 2 and "'other' is neither a model folder nor a model of the store" in said


def test_the_recall_that_an_index_check_asks_is_the_option_s_or_the_model_s(tmp_path: Path) -> None:
    """So many vectors are on one circle that neighbours are nearer to each other than half can tell."""
    folder = write_folder(
        tmp_path / "net",
        LINEAR,
        samples=samples_of({"x": [4]}, 24, seed=1),
        outputs=[tensor("y", "FP32", [-1, 3], kind="embedding")],
        parity={"min_recall": 0},
    )
    store = ("--store", tmp_path / "store")
    assert run("convert", folder, *store)[0] == 0
    random = np.random.default_rng(1)
    np.savez(tmp_path / "x.npz", x=random.normal(size=(30, 4)).astype(np.float32))
    angles = random.uniform(0, 2 * np.pi, 50_000)
    circle = np.stack([np.cos(angles), np.sin(angles), np.zeros_like(angles)], 1)
    np.save(tmp_path / "index.npy", circle.astype(np.float32))
    asked = ("index-check", "net", "--index", tmp_path / "index.npy", "--queries", tmp_path / "x.npz", *store)
    code, facts, said = run(*asked)
    assert code == 0 and facts["forms"]["torch"]["recall"] < 0.99, said
    code, facts, said = run(*asked, "--min-recall", "1")
    assert (code, facts["holds"], facts["min_recall"]) == (3, False, 1.0), said
