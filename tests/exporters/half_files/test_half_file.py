"""One file in, one proven half out: the proof beside it proves the file again, and no other file."""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.half_files import half_file
from halfeven.exporters.half_files.half_file import (
    EQUAL,
    FP32,
    REFUSED,
    model_card,
    proof_folder,
    verify,
    write_half,
)
from halfeven.exporters.half_files.lock_file import read_lock, write_lock
from halfeven.exporters.half_files.measured import found_file, measured
from halfeven.exporters.onnx.reading import large_files
from halfeven.models.errors import BadInput, BadSamples, BadSetting, Conflict, ParityRefused
from halfeven.models.store.manifest import LIVE, sha256_of, write_manifest
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks.one_file_plans import by_convert, digests
from tests.exporters.half_files.onnx_net import answers, samples, written
from tests.exporters.half_files.verifier import verified
from tests.links import behind_links

pytestmark = pytest.mark.slow  # conversions and children


def test_the_file_answers_as_the_original_and_says_what_was_proven(half: Path) -> None:
    x = np.random.normal(size=(5, 16)).astype(np.float32)
    found, expected = answers(half, x), answers(half.parent / "net.onnx", x)
    np.testing.assert_allclose(found, expected, atol=4 * 2**-11 * np.abs(expected).max())
    about = {each.key: each.value for each in onnx.load(half).metadata_props}
    assert about["halfeven.verdict"].startswith("Equal on 12 of your samples")
    assert about["halfeven.precision"] == "fp16" and len(about["halfeven.original"]) == 64
    assert any(tensor.data_type == TensorProto.FLOAT16 for tensor in onnx.load(half).graph.initializer)


def test_the_page_of_a_proof_has_the_digest_of_the_original_alone(half: Path) -> None:
    proof = proof_folder(half)
    rows = re.findall(r"\| `(.+)` \| `([0-9a-f]{64})` \|", (proof / "README.md").read_text())
    assert dict(rows) == {"original.onnx": sha256_of(proof / "original.onnx")}


def test_the_proof_proves_the_file_again_and_with_samples_that_are_new(half: Path, tmp_path: Path) -> None:
    facts = verify(half)
    assert facts["status"] == "equal" and facts["samples"]["judging"] == 12
    assert verify(half, samples(tmp_path / "new.npz", 40))["samples"]["judging"] == 40
    np.savez(tmp_path / "copies.npz", x=np.ones((200, 16), np.float32))
    assert verify(half, tmp_path / "copies.npz")["samples"]["judging"] == 1


def test_a_proof_says_whose_samples_it_was_made_on_also_when_it_is_made_again(tmp_path: Path) -> None:
    half = tmp_path / "net.fp16.onnx"
    write_half(written(tmp_path / "net.onnx"), half)
    facts = verify(half)
    assert facts["samples"]["source"] == "generated" and "on 16 generated samples" in model_card(half, facts)
    assert "on 40 of your samples" in model_card(half, verify(half, samples(tmp_path / "new.npz", 40)))


def test_convert_gives_the_same_plan_verdict_and_graph(half: Path, tmp_path: Path) -> None:
    """``python -m tests.benchmarks.one_file_plans`` checks the same for the corpus, the zoo and real files."""
    rows = Options(samples=half.with_name("x.npz"))
    assert by_convert(half.with_name("net.onnx"), tmp_path, rows) == {"verdict": "equal"} | digests(
        proof_folder(half)
    )


def test_a_model_without_a_batch_axis_takes_a_scalar(tmp_path: Path) -> None:
    """NumPy makes a number, and no array, of one element of a row of scalars."""
    weight = numpy_helper.from_array(np.random.normal(size=(16, 8)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Mul", ["h", "by"], ["y"])]
    sizes = {"x": [16], "by": [], "y": [8]}
    x, by, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items())
    graph = helper.make_graph(nodes, "scaled", [x, by], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "scaled.onnx")
    assert write_half(tmp_path / "scaled.onnx", tmp_path / "half.onnx", Options())["verdict"] == EQUAL


def test_no_half_is_written_under_limits_that_verify_refuses(tmp_path: Path) -> None:
    written(tmp_path / "net.onnx")
    tensors = "".join(
        f'[[{kind}]]\nname = "{name}"\ndatatype = "FP32"\nshape = [-1, {size}]\n'
        for kind, name, size in (("inputs", "x", 16), ("outputs", "y", 4))
    )
    (tmp_path / "model.toml").write_text(
        f'name = "net"\nsource = "net.onnx"\n{tensors}[parity]\nmin_slice_sqnr_db = 5.0\n'
    )
    with pytest.raises(ParityRefused, match="at least 10 dB"):
        write_half(tmp_path, tmp_path / "half.onnx", Options())
    assert not (tmp_path / "half.onnx").exists()


def test_new_samples_that_leave_the_range_of_half_are_refused(tmp_path: Path) -> None:
    """ONNX Runtime holds the middle of this half in FP32 on a CPU, a device would not."""
    half, rows = tmp_path / "half.onnx", samples(tmp_path / "x.npz")
    assert write_half(written(tmp_path / "net.onnx", 100.0), half, Options(samples=rows))["verdict"] == EQUAL
    np.savez(rows, x=np.random.normal(scale=1000.0, size=(24, 16)).astype(np.float32))
    assert verify(half, rows)["status"] == "refused"


@pytest.mark.parametrize("number", [0.0, np.nan])
def test_samples_to_which_fp32_answers_nothing_prove_nothing(
    half: Path, number: float, tmp_path: Path
) -> None:
    np.savez(tmp_path / "nothing.npz", x=np.full((8, 16), number, np.float32))
    with pytest.raises(BadSamples, match="proves nothing of a half"):
        verify(half, tmp_path / "nothing.npz")


@pytest.mark.parametrize("file", ["net.fp16.onnx", "net.fp16.proof/half.onnx", "net.fp16.proof/parity.json"])
def test_a_file_that_is_not_the_proven_one_is_named(half: Path, file: str) -> None:
    changed = half.parent / file
    changed.write_bytes(changed.read_bytes() + b"\n")
    with pytest.raises(ParityRefused, match=f"{changed.name} is not the file that was proven"):
        verify(half)
    with pytest.raises(ParityRefused, match=f"{changed.name} is not the file that was proven"):
        write_lock(half.with_name("halfeven.lock"), {"net.fp16.onnx": found_file(half)})


def test_a_manifest_that_calls_the_half_coarser_is_refused(half: Path) -> None:
    """The limits would be those of bfloat16, eight times as wide."""
    path = proof_folder(half) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"half": "bf16"}))
    with pytest.raises(ParityRefused, match="says that the half is bf16, and it was proven as fp16"):
        verify(half)


def test_a_changed_weight_is_not_proven_by_digests_that_were_computed_again(half: Path) -> None:
    model = onnx.load(half)
    weight = next(tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT16)
    weight.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(weight), weight.name))
    onnx.save(model, half)
    proof = proof_folder(half)
    shutil.copyfile(half, proof / "half.onnx")
    manifest = json.loads((proof / "manifest.json").read_text())
    (proof / "manifest.json").unlink()
    write_manifest(proof, LIVE, {key: manifest[key] for key in manifest if key not in ("files", "digest")})
    assert verify(half)["status"] == "refused"


def test_a_second_run_takes_the_place_of_the_first(half: Path) -> None:
    before = half.read_bytes()
    facts = write_half(
        half.parent / "net.onnx", half, Options(samples=half.parent / "x.npz", keep=("first_product",))
    )
    assert facts["verdict"] == EQUAL and half.read_bytes() != before and verify(half)["status"] == "equal"


def test_two_runs_on_one_target_move_their_files_one_after_the_other(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, held = half_file._finish, list[bool]()

    def finished(target: Path) -> None:
        folder = os.open(half.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(False)
        except BlockingIOError:
            held.append(True)
        os.close(folder)
        finish(target)

    monkeypatch.setattr(half_file, "_finish", finished)
    write_half(half.parent / "net.onnx", half, Options(samples=half.parent / "x.npz"))
    assert held == [True, True], "as the run begins, and when its half is whole"


@pytest.mark.parametrize("moved", range(5))
def test_a_replacement_that_was_cut_off_is_finished(
    half: Path, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half of before is there until the folder is whole; afterwards the next run puts the new one there, wherever
    the process ended, and what only reads moves nothing."""
    before = half.read_bytes()
    options = Options(samples=half.parent / "x.npz", keep=("first_product",))

    def ended(_: Path) -> None:
        ready, proof = half.with_name(".net.fp16.ready"), proof_folder(half)
        moves = ((ready / half.name, half), (proof, ready / "former.proof"), (ready / proof.name, proof))
        for path, place in moves[: max(moved - 1, 0)]:
            path.replace(place)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(half_file, "fsync" if moved == 0 else "_finish", ended if moved == 0 else _once(ended))
        write_half(half.parent / "net.onnx", half, options)
    if moved:
        with pytest.raises(BadInput, match="is not whole: a run of `halfeven fp16` ended before"):
            verify(half)
        with pytest.raises(BadSamples, match="cannot be read"):  # a run that ends early
            write_half(half.parent / "net.onnx", half, Options(samples=half.parent / "unknown.npz"))
    assert verify(half)["status"] == "equal" and (half.read_bytes() == before) == (moved == 0)
    assert sorted(path.name for path in half.parent.iterdir()) == [
        "net.fp16.onnx", "net.fp16.proof", "net.onnx", "x.npz",
    ]  # fmt: skip


def test_the_folders_of_a_run_that_was_killed_go_with_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    source = written(tmp_path / "net.onnx")
    dead = [tmp_path / place / ".halfeven-fp16-dead" for place in ("", "shared")]
    for folder in dead:
        folder.mkdir(parents=True)
        (folder / "weights").touch()
    with pytest.raises(BadSamples, match="cannot be read"):
        write_half(source, tmp_path / "half.onnx", Options(samples=tmp_path / "unknown.npz"))
    assert not any(folder.exists() for folder in dead) and not [*(tmp_path / "shared").iterdir()]


def test_nothing_but_a_half_is_moved_out_of_the_hidden_folder(half: Path) -> None:
    """The folder may have come with a half of a stranger's."""
    ready, model = half.with_name(".net.fp16.ready"), half.parent / "net.onnx"
    ready.mkdir()
    (ready / "net.onnx").write_text("another model")
    before = model.read_bytes()
    with pytest.raises(BadInput, match="is not whole"):
        verify(half)
    with pytest.raises(Conflict, match=r"net\.onnx is no part of a half"):
        write_half(model, half, Options(samples=half.parent / "x.npz"))
    assert model.read_bytes() == before


@pytest.mark.parametrize("mine", ["net.fp16.onnx", "net.fp16.data", "net.fp16.proof/mine.txt"])
def test_a_half_that_was_left_ready_replaces_nothing_of_the_users(half: Path, mine: str) -> None:
    """The user put a file of their own there since."""
    ready, model, rows = half.with_name(".net.fp16.ready"), half.parent / "net.onnx", half.parent / "x.npz"
    ready.mkdir()
    for path in (half, proof_folder(half)):
        path.rename(ready / path.name)
    (half.parent / mine).parent.mkdir(exist_ok=True)
    (half.parent / mine).write_text("mine")
    for source in (model, half.parent / "unknown.onnx"):
        with pytest.raises(Conflict, match="is not replaced"):
            write_half(source, half, Options(samples=rows))
    assert (half.parent / mine).read_text() == "mine" and len([*ready.iterdir()]) == 2
    (half.parent / mine).rename(half.parent / "mine")
    with pytest.raises(BadInput, match="does not exist"):
        write_half(half.parent / "unknown.onnx", half, Options(samples=rows))
    assert not half.exists()
    with pytest.raises(BadSamples, match="cannot be read"):  # a run that ends early
        write_half(model, half, Options(samples=half.parent / "unknown.npz"))
    assert verify(half)["status"] == "equal" and not ready.exists()


@pytest.mark.parametrize("name", [".", "", "/"])
def test_a_folder_is_no_half(name: str) -> None:
    with pytest.raises(BadInput, match="no such file; expected a half"):
        verify(Path(name))


@pytest.mark.parametrize(
    "change",
    [{"notes": ["proven on ten million rows"]}, {"model": "bert"}, {"samples": {"count": 10**7}}, None],
)
def test_a_manifest_that_states_other_facts_is_refused(half: Path, change: dict[str, Any] | None) -> None:
    path = proof_folder(half) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change) if change else "")
    with pytest.raises(ParityRefused, match="states other facts" if change else "does not hold"):
        verify(half)


def test_the_card_names_the_file_that_the_half_was_made_from(half: Path) -> None:
    source = half.parent / "net.onnx"
    assert f"`net.onnx`, SHA-256 `{sha256_of(source)}`" in model_card(half, verify(half))


def _once(ended: Callable[[Path], None]) -> Callable[[Path], None]:
    """The second call, behind the one that looks for what an earlier run left."""
    calls = iter((lambda _: None, ended))
    return lambda target: next(calls)(target)


@pytest.mark.parametrize(
    ("level", "verdict"), [("O3", REFUSED), ("O0", FP32)], ids=["not equal", "nothing in half"]
)
def test_of_what_is_not_proven_equal_nothing_is_written(tmp_path: Path, level: str, verdict: str) -> None:
    source = written(tmp_path / "net.onnx", loud=1e5)
    facts = write_half(
        source, tmp_path / "out.onnx", Options(samples=samples(tmp_path / "x.npz"), level=level)
    )
    assert facts["verdict"] == verdict and facts["file"] is None and facts["reason"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "x.npz"]


def test_nothing_of_the_users_is_overwritten(half: Path) -> None:
    model = half.parent / "net.onnx"
    with pytest.raises(BadSetting, match="is the model itself"):
        write_half(model, model)
    for name in (str(half.parent / "out.bin"), ".", "/", ""):
        with pytest.raises(BadSetting, match=r"ends with \.onnx"):
            write_half(model, Path(name))
    with pytest.raises(BadSetting, match="there is no folder"):
        write_half(model, half.parent / "none" / "out.onnx")
    (half.parent / "folder.onnx").mkdir()
    with pytest.raises(BadSetting, match="expected a file in a folder that may be written"):
        write_half(model, half.parent / "folder.onnx")
    for name, text in (("mine.onnx", model.read_bytes()), ("notes.onnx", b"mine"), ("out.data", b"mine")):
        (half.parent / name).write_bytes(text)
        with pytest.raises(Conflict, match=f"{name} is no half of an earlier run"):
            write_half(model, (half.parent / name).with_suffix(".onnx"))
        (half.parent / name).unlink()
    (proof_folder(half) / "signature.json").write_text("mine")
    with pytest.raises(Conflict, match=r"signature\.json is no part of the proof"):
        write_half(model, half)
    (proof_folder(half) / "signature.json").unlink()
    half.write_bytes(
        half.read_bytes() + b"\n\0"
    )  # it calls itself ours, and is another file than the proven one
    with pytest.raises(Conflict, match="is no half of an earlier run"):
        write_half(model, half)
    (half.parent / "out.proof").symlink_to(half.parent / "elsewhere")
    with pytest.raises(Conflict, match=r"out\.proof is a symbolic link"):
        write_half(model, half.parent / "out.onnx")
    (half.parent / "out.proof").unlink()
    (half.parent / "out.proof").mkdir()
    (half.parent / "out.proof" / "mine.txt").write_text("mine")
    with pytest.raises(Conflict, match="no proof of an earlier run"):
        write_half(model, half.parent / "out.onnx")


def test_a_name_that_is_not_in_utf_8_is_refused_before_the_conversion_and_a_folder_of_the_model_may_have_one(
    tmp_path: Path,
) -> None:
    """Linux takes any bytes; ONNX Runtime and model.toml do not."""
    odd = tmp_path / os.fsdecode(b"m\xff")
    odd.mkdir()
    source, options = written(odd / "net.onnx"), Options(samples=samples(tmp_path / "x.npz"))
    for target in (odd.with_suffix(".onnx"), odd / "half.onnx"):
        with pytest.raises(BadSetting, match=r"m\\udcff.*: expected a name in UTF-8"):
            write_half(source, target, Options(samples=tmp_path / "unknown.npz"))
    assert write_half(source, tmp_path / "half.onnx", options)["verdict"] == EQUAL
    source = source.replace(odd / odd.with_suffix(".onnx").name)
    with pytest.raises(BadInput, match=r"the name 'm\\udcff\.onnx' is not in UTF-8"):
        write_half(source, tmp_path / "half.onnx", options)


def test_the_weights_of_large_halves_in_one_folder_are_held_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_files, "SELF_CONTAINED_BELOW", 256)
    monkeypatch.setattr(large_files, "_SMALL", 64)
    rows, halves = samples(tmp_path / "x.npz"), [tmp_path / "original.onnx", tmp_path / "b.onnx"]
    for half, loud in zip(halves, (1.0, 2.0), strict=True):
        net = written(tmp_path / f"net {loud}.onnx", loud)
        assert write_half(net, half, Options(samples=rows))["verdict"] == EQUAL
        x = np.random.normal(size=(5, 16)).astype(np.float32)
        np.testing.assert_allclose(answers(half, x), answers(net, x), atol=0.1)
    for half in halves:
        assert verify(half)["status"] == "equal" and verified(half)[0] == 0
    before = next(measured(found_file(halves[1])))["file"]
    data = halves[1].with_suffix(".data")
    weights = bytearray(data.read_bytes())
    weights[0] ^= 1  # so little that the gate does not refuse it
    data.write_bytes(weights)
    with pytest.raises(ParityRefused, match=r"b\.data is not the file that was proven"):
        verify(halves[1])
    assert "b.data is not the file that was proven" in verified(halves[1])[1]
    assert next(measured(found_file(halves[1])))["file"] != before
    data.write_bytes(b"mine")
    with pytest.raises(Conflict, match=r"b\.data is no half of an earlier run"):
        write_half(tmp_path / "net 2.0.onnx", halves[1], Options(samples=rows))
    data = halves[0].with_suffix(".data")
    monkeypatch.undo()  # of a small half no file of weights is left
    assert write_half(tmp_path / "net 1.0.onnx", halves[0], Options(samples=rows))["verdict"] == EQUAL
    assert not data.exists() and verify(halves[0])["status"] == "equal"


def test_a_half_is_verified_and_locked_where_a_cache_has_its_files_as_links(half: Path) -> None:
    lock = half.with_name("halfeven.lock")
    behind_links([half, *proof_folder(half).iterdir()], half.parent / "cache")
    assert verify(half)["status"] == "equal"
    locked = write_lock(lock, {"": found_file(half)})["halves"]
    behind_links([lock], half.parent / "cache of locks")
    assert [facts["file"] for facts in read_lock(lock)] == [facts["file"] for facts in locked]
    write_lock(lock, {"": found_file(half)})


def test_a_file_without_a_proof_is_not_verified(half: Path) -> None:
    with pytest.raises(BadInput, match="has no proof: expected the folder"):
        verify(half.parent / "net.onnx")
    with pytest.raises(BadInput, match="no such file"):
        verify(half.parent / "none.onnx")
