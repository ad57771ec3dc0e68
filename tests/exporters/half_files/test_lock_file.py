"""A lock holds while nothing changes, and names a changed weight, changed kernels and a slowed one of a real half."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.half_files import lock_file, measured
from halfeven.exporters.half_files.half_file import write_half
from halfeven.exporters.half_files.lock_file import Change, checked, read_lock, write_lock
from halfeven.exporters.half_files.measured import Found, found_file, timed
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.errors import BadInput, Conflict, EngineFailed, NewerFormat, ParityRefused
from halfeven.models.store.manifest import LIVE, write_manifest
from halfeven.models.store.store import Store, Version
from onnx import numpy_helper

from tests.exporters.half_files.onnx_net import samples, written
from tests.kept import kept_store

pytestmark = pytest.mark.slow  # a conversion and proofs


def _make(where: Path) -> None:
    where.mkdir()
    write_half(
        written(where / "net.onnx"), where / "net.fp16.onnx", Options(samples=samples(where / "x.npz"))
    )
    write_lock(where / "halfeven.lock", {"net.fp16.onnx": found_file(where / "net.fp16.onnx")})


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return shutil.copytree(kept_store(__file__, _make), tmp_path / "files") / "halfeven.lock"


def found(lock: Path) -> list[Change]:
    ((_, form, changes),) = checked(read_lock(lock), lambda target: found_file(Path(target)))
    assert form == "onnx"
    return changes


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are always those of the lock."""
    monkeypatch.setattr(measured, "timed", lambda *_: {"half": 0.0, "fp32": 0.0})


@pytest.mark.usefixtures("no_clock")
def test_twenty_checks_of_an_unchanged_half_find_nothing(lock: Path) -> None:
    assert [found(lock) for _ in range(20)] == [[]] * 20


@pytest.mark.usefixtures("no_clock")
def test_a_changed_weight_is_named(lock: Path) -> None:
    path = lock.parent / "net.fp16.onnx"
    model = onnx.load(path)
    weight = next(one for one in model.graph.initializer if one.name.startswith("last"))
    weight.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(weight), weight.name))
    onnx.save(model, path)
    changes = found(lock)
    assert [change.kind for change in changes] == ["file", "verdict"]
    assert f"1 of its 2 weights differ, the first is {weight.name}" in changes[0].message


@pytest.mark.usefixtures("no_clock")
def test_a_half_that_does_not_run_any_more_does_not_hold(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because ONNX Runtime lacks a kernel after an upgrade, or because the file was cut."""

    def lacks(*_: object) -> None:
        raise EngineFailed("could not find an implementation for MatMul")

    with monkeypatch.context() as upgraded:
        upgraded.setattr(OnnxEngine, "run", lacks)
        (change,) = found(lock)
    assert change.kind == "verdict" and change.fails and "for MatMul" in change.message
    path = lock.parent / "net.fp16.onnx"
    path.write_bytes(path.read_bytes()[:900])
    assert [(change.kind, change.fails) for change in found(lock)] == [("file", True), ("verdict", True)]


@pytest.mark.usefixtures("no_clock")
def test_another_processor_is_named(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "hardware", lambda: "another one")
    (change,) = found(lock)
    assert change.kind == "processor" and not change.fails and "another one" in change.message


@pytest.mark.usefixtures("no_clock")
def test_an_environment_without_torch_is_no_other_processor(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = json.loads(lock.read_text())["halves"][0]["environment"]["device"].partition(",")[0]
    bare = {"torch": "none", "device": kind, "onnxruntime": onnxruntime.__version__}
    monkeypatch.setattr(measured, "environment", lambda _: bare)
    assert [change.message.partition(":")[0] for change in found(lock)] == ["torch"]


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(("error", "kinds"), [(1e-4, ["bits"]), (0.1, ["verdict"])])
def test_a_kernel_that_computes_otherwise_is_told_from_one_that_is_wrong(
    lock: Path, monkeypatch: pytest.MonkeyPatch, error: float, kinds: list[str]
) -> None:
    run = OnnxEngine.run

    def otherwise(self: OnnxEngine, *given: Any) -> list[np.ndarray]:
        answers = run(self, *given)
        return [one * np.float32(1 + error) for one in answers] if self.precision == "fp16" else answers

    monkeypatch.setattr(OnnxEngine, "run", otherwise)
    assert [change.kind for change in found(lock)] == kinds


def test_a_slowed_kernel_is_named_and_a_bad_moment_is_measured_again(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(times: Iterator[Mapping[str, float]]) -> list[Change]:
        monkeypatch.setattr(measured, "timed", lambda *_: next(times))
        return found(lock)

    facts = json.loads(lock.read_text())
    facts["halves"][0]["milliseconds"] = {"half": 1.0, "fp32": 1.0}
    lock.write_text(json.dumps(facts))
    slow, fast = {"half": 9.0, "fp32": 1.0}, {"half": 1.1, "fp32": 1.0}
    assert planted(iter([slow, slow, fast])) == []
    crowded, a_larger_share = {"half": 4.0, "fp32": 6.6}, {"half": 1.0, "fp32": 0.9}
    assert planted(iter([crowded, a_larger_share])) == []
    assert [change.kind for change in planted(iter([slow] * (lock_file.AGAIN + 1)))] == ["speed"]


def test_a_verdict_that_fails_once_counts_where_a_slow_half_is_measured_again(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (then,) = read_lock(lock)
    then = {**then, "milliseconds": {"half": 1.0, "fp32": 1.0}}
    slow = {**then, "milliseconds": {"half": 9.0, "fp32": 1.0}}
    failed = {**then, "passed": False, "summary": "off", "bits": {}, "milliseconds": {}}
    measurements = iter([slow, failed])
    monkeypatch.setattr(lock_file, "measured", lambda *_: iter([next(measurements)]))
    ((_, _, changes),) = checked([then], lambda target: found_file(Path(target)))
    assert [change.kind for change in changes] == ["verdict"]


def test_both_sides_are_timed_in_turns_and_the_first_run_does_not_count() -> None:
    ticks = iter(np.cumsum([0.5, 0.5, *[0.001, 0.004] * 1000]))
    order = list[str]()
    half, fp32 = (lambda _, name=name: order.append(name) or {} for name in ("half", "fp32"))
    found = timed(half, fp32, {}, lambda: float(next(ticks)))
    assert order[:4] == ["half", "fp32", "half", "fp32"] and found["half"] < 500 and found["fp32"] < 500


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("library", ["onnxruntime", "numpy", "onnx", "python", "halfeven"])
def test_another_library_is_named(lock: Path, library: str) -> None:
    facts = json.loads(lock.read_text())
    environment = facts["halves"][0]["environment"]
    now, environment[library] = environment[library], "0.1-old"
    lock.write_text(json.dumps(facts))
    (change,) = found(lock)
    assert (change.kind, change.fails) == ("environment", False)
    assert change.message == f"{library}: 0.1-old then, {now} now"


@pytest.mark.usefixtures("no_clock")
def test_every_half_is_looked_at_also_behind_one_that_is_gone(lock: Path) -> None:
    facts = json.loads(lock.read_text())
    facts["halves"].insert(0, facts["halves"][0] | {"target": "gone.onnx"})
    lock.write_text(json.dumps(facts))
    gone, there = checked(read_lock(lock), lambda target: found_file(Path(target)))
    assert [(change.kind, change.fails) for change in gone[2]] == [("file", True)] and not there[2]


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("file", ["manifest.json", "original.onnx", "samples.safetensors", ""])
def test_a_file_of_the_proof_that_is_gone_is_a_change(lock: Path, file: str) -> None:
    folder = lock.with_name("net.fp16.proof")
    (folder / file).unlink() if file else shutil.rmtree(folder)
    (change,) = found(lock)
    assert change.fails and change.kind == ("proof" if file else "file")


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Store, list[Mapping[str, Any]]]:
    """A store with one version, and the lock of it."""
    store = Store(tmp_path / "store")
    convert(
        written(tmp_path / "net.onnx"), store, Options(samples=samples(tmp_path / "x.npz"), forms=("onnx",))
    )
    write_lock(tmp_path / "halfeven.lock", {"net": Found(store.numbered("net", "1"))})
    return store, read_lock(tmp_path / "halfeven.lock")


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("half.onnx", "file"),
        ("parity.json", "proof"),
        ("precision.json", "proof"),
        ("manifest.json", "proof"),
    ],
)
def test_a_changed_file_of_a_locked_version_is_a_change(
    stored: tuple[Store, list[Mapping[str, Any]]], file: str, kind: str
) -> None:
    store, halves = stored
    ((_, _, changes),) = checked(halves, lambda _: Found(store.numbered("net", "1")))
    assert not changes
    path = store.numbered("net", "1").folder / file
    path.write_bytes(path.read_bytes() + b"\n")
    ((_, _, changes),) = checked(halves, lambda _: Found(store.numbered("net", "1")))
    assert [(change.kind, change.fails) for change in changes] == [(kind, True)]


@pytest.mark.usefixtures("no_clock")
def test_another_active_version_is_named_and_its_answers_are_blamed_on_no_kernel(
    stored: tuple[Store, list[Mapping[str, Any]]], tmp_path: Path
) -> None:
    store, halves = stored
    rows = samples(tmp_path / "other.npz", rows=64)
    convert(tmp_path / "net.onnx", store, Options(samples=rows, forms=("onnx",)))
    ((_, _, (change,)),) = checked(halves, lambda _: Found(store.numbered("net", "2")))
    assert change.kind == "file" and "version 2 is active now, and version 1 was locked" in change.message


FACTS: dict[str, Any] = {
    "target": "x.onnx", "form": "onnx", "file": "", "weights": {}, "environment": {"device": "cpu"}, "processor": "",
    "passed": True, "summary": "", "proof": "", "cores": 1, "max_error_u": 0.0, "bits": {"half": "", "fp32": ""},
    "milliseconds": {"half": 1.0, "fp32": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 1, "halves": []}',
        '{"format": 1, "halves": [{"target": "x"}]}',
        "[" * 9999,
        json.dumps({"halves": [FACTS | {"target": 1}]}),
        json.dumps({"halves": [FACTS | {"environment": {}}]}),
        json.dumps({"halves": [FACTS | {"milliseconds": {"half": "fast", "fp32": 1.0}}]}),
    ],
)
def test_a_file_that_is_no_lock_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "halfeven.lock").write_text(text)
    with pytest.raises(BadInput, match=r"halfeven\.lock is not a lock that `halfeven lock` wrote"):
        read_lock(tmp_path / "halfeven.lock")


def test_a_lock_that_is_not_there_is_told_from_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"No such file or directory.*: expected a lock, which `halfeven lock`"
    ):
        read_lock(tmp_path / "halfeven.lock")


def test_a_target_is_found_again_behind_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the lock is a link, and the half is one, whose proof is beside the link."""
    monkeypatch.setattr(
        lock_file, "measured", lambda *_: [{key: FACTS[key] for key in FACTS if key != "target"}]
    )
    monkeypatch.setattr(lock_file, "check_digests", lambda *_: None)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "locks").symlink_to(tmp_path / "deep" / "er")
    (tmp_path / "blob").touch()
    (half := tmp_path / "net.onnx").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    for file in (half, Path("net.onnx")):
        write_lock(
            path := tmp_path / "locks" / "halfeven.lock", {"": Found(Version("net", 1, tmp_path, {}), file)}
        )
        assert read_lock(path)[0]["target"] == str(half)


def test_a_file_that_is_no_lock_is_not_replaced(lock: Path) -> None:
    half = lock.with_name("net.fp16.onnx")
    before = half.read_bytes()
    for file in (half, lock.with_name("x.npz")):
        with pytest.raises(Conflict, match=f"{file.name} is no lock of an earlier run"):
            write_lock(file, {str(half): found_file(half)})
    assert half.read_bytes() == before


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("redone", [False, True])
def test_a_proof_that_was_changed_does_not_hold(lock: Path, redone: bool) -> None:
    """Also where its digests were computed again: a lock knows the digest of the whole proof."""
    folder = lock.with_name("net.fp16.proof")
    (folder / "precision.json").write_text("{}")
    if redone:
        facts = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").unlink()
        write_manifest(
            folder, LIVE, {key: facts[key] for key in facts if key not in ("files", "digest", "status")}
        )
    (change,) = found(lock)
    assert (change.kind, change.fails) == ("proof", True)


@pytest.mark.parametrize("change", [{"format": None}, {"passed": False}])
def test_a_lock_that_says_too_little_is_none(lock: Path, change: dict[str, Any]) -> None:
    said = json.loads(lock.read_text())
    said["halves"][0] |= {key: value for key, value in change.items() if key == "passed"}
    said |= {key: value for key, value in change.items() if key == "format"}
    lock.write_text(json.dumps(said))
    with pytest.raises(BadInput, match="is not a lock that `halfeven lock` wrote"):
        read_lock(lock)


def test_a_half_that_is_not_equal_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "measured", lambda *_: [FACTS | {"passed": False}])
    with pytest.raises(ParityRefused, match="nothing to lock"):
        write_lock(tmp_path / "halfeven.lock", {"x@1": Found(Version("x", 1, tmp_path, {}))})
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_later_release_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "halfeven.lock").write_text('{"format": 99, "halves": []}')
    with pytest.raises(NewerFormat, match="has format 99"):
        read_lock(tmp_path / "halfeven.lock")
