"""A setup is measured once for a version: kept with the processor's name, and handed on to what is trained from it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.engines.cpu.setup import PACKED_PRODUCTS, CpuSetup
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import LIVE, Store, Version
from halfeven.serve.versions.loading import kept_setups, tuned
from halfeven.serve.versions.loading.candidate_forms import VersionHere
from halfeven.serve.versions.loading.cpu_choice import CpuChoice, TimedSetup
from halfeven.serve.versions.loading.kept_setups import KeptSetup, keep_setup, kept_setup, measured_setup

CPU = torch.device("cpu")
SPEC = ModelSpec("net", (TensorSpec("x", "FP32", (Dim(),)),), (TensorSpec("y", "FP32", (Dim(),)),), 4)
FOUND = CpuSetup(2, frozenset({PACKED_PRODUCTS}))


class Machine:
    """A stand-in for a device's thread, which counts the measurements."""

    device = CPU
    measured = 0
    crowded = False

    def call(self, run: Any) -> Any:
        return run()

    def choose(self, *_: Any) -> CpuChoice:
        self.measured += 1
        return CpuChoice(
            FOUND,
            (TimedSetup(CpuSetup(1), {1: 0.5, 4: 2.0}), TimedSetup(FOUND, {1: 0.2, 4: 0.8})),
            self.crowded,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(kept_setups, "choose_setup", machine.choose)
    monkeypatch.setattr(tuned, "this_processor", lambda: "Processor One, AVX2")
    return machine


def publish(store: Store, parent: int | None = None, weights: float = 0.0) -> Version:
    with store.draft("net") as draft:
        draft.write_json("spec.json", SPEC.to_json())
        draft.write_json("weights.json", weights)
        return draft.publish(LIVE, {"half": None, "parent": parent})


def asked(version: Version, machine: Machine, form: str = "torch", precision: str = "fp32") -> CpuSetup:
    samples = Samples({"x": np.zeros(8, np.float32)})
    return measured_setup(VersionHere(SPEC, samples, machine, version), form, precision)  # type: ignore[arg-type]


def test_a_form_of_a_version_is_measured_once(machine: Machine, tmp_path: Path) -> None:
    version = publish(Store(tmp_path))
    assert [asked(version, machine) for _ in range(3)] == [FOUND] * 3
    assert machine.measured == 1
    asked(version, machine, "onnx")
    asked(version, machine, precision="bf16")
    assert machine.measured == 3
    (path,) = (version.folder.parent / "tuned").glob("setups-cpu-*.json")
    kept = json.loads(path.read_bytes())
    assert kept["1 torch fp32"]["conditions"]["processor"] == "Processor One, AVX2"
    assert [row["rows"] for row in kept["1 torch fp32"]["measured"]] == [1, 4, 1, 4]


def test_a_measurement_is_kept_with_its_spread(machine: Machine, tmp_path: Path) -> None:
    version = publish(Store(tmp_path))
    runs = {1: [0.3, 0.2, 0.4], 4: [0.8]}
    keep_setup(version, "torch", "fp32", CPU, FOUND, [TimedSetup.of(FOUND, runs)], rounds=4)
    (path,) = (version.folder.parent / "tuned").glob("setups-cpu-*.json")
    one, four = json.loads(path.read_bytes())["1 torch fp32"]["measured"]
    assert {key: one[key] for key in ("seconds", "median", "longest", "runs")} == {
        "seconds": 0.2, "median": 0.3, "longest": 0.4, "runs": 3,
    }  # fmt: skip
    assert (four["seconds"], four["runs"]) == (0.8, 1)
    assert kept_setup(version, "torch", "fp32", CPU) == KeptSetup(FOUND, {1: 0.2, 4: 0.8}, 4)


@pytest.mark.parametrize(
    "changes", [{"rounds": "many"}, {"measured": 3}, {"measured": [{"rows": 1}, 7]}, {"measured": None}]
)
def test_an_entry_with_odd_measurements_still_names_its_setup(
    machine: Machine, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A file of an earlier version has neither spread nor rounds."""
    version = publish(Store(tmp_path))
    asked(version, machine)
    (path,) = (version.folder.parent / "tuned").glob("setups-cpu-*.json")
    entries = json.loads(path.read_bytes())
    path.write_text(json.dumps({key: entry | changes for key, entry in entries.items()}))
    kept = kept_setup(version, "torch", "fp32", CPU)
    assert kept is not None and kept.setup == FOUND and kept.rounds == 0
    assert kept.seconds == ({1: 0.2, 4: 0.8} if "rounds" in changes else {})


def test_another_processor_is_measured_anew(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = publish(Store(tmp_path))
    asked(version, machine)
    monkeypatch.setattr(tuned, "this_processor", lambda: "Processor Two, AVX512")
    asked(version, machine)
    assert machine.measured == 2


def test_a_retrained_version_takes_its_parents(machine: Machine, tmp_path: Path) -> None:
    store = Store(tmp_path)
    parent = publish(store)
    asked(parent, machine)
    assert asked(publish(store, parent=parent.number), machine) == FOUND
    assert machine.measured == 1
    asked(publish(store), machine)
    assert machine.measured == 2


@pytest.mark.parametrize("retrained", [False, True])
def test_another_model_under_the_same_number_is_measured_anew(
    machine: Machine, tmp_path: Path, retrained: bool
) -> None:
    """A store was made anew, and the state of the server that reads it, or a node's copy, has the old measurements."""
    store = Store(tmp_path)
    old = publish(store)
    asked(old, machine)
    shutil.rmtree(old.folder)
    new = publish(store, weights=1.0)
    assert new.number == old.number
    asked(publish(store, parent=new.number) if retrained else new, machine)
    assert machine.measured == 2


def test_what_was_measured_on_a_crowded_machine_is_measured_again(machine: Machine, tmp_path: Path) -> None:
    store = Store(tmp_path)
    version = publish(store)
    machine.crowded = True
    assert asked(version, machine) == FOUND
    assert asked(publish(store, parent=version.number), machine) == FOUND and machine.measured == 1
    machine.crowded = False
    asked(version, machine)
    asked(version, machine)
    assert machine.measured == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"1 torch fp32": {}}',
        '{"1 torch fp32": 3}',
        '{"1 torch fp32": {"conditions": 1, "threads": "x"}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_costs_a_measurement(machine: Machine, tmp_path: Path, text: str) -> None:
    version = publish(Store(tmp_path))
    asked(version, machine)
    (path,) = (version.folder.parent / "tuned").glob("setups-cpu-*.json")
    path.write_text(text)
    assert asked(version, machine) == FOUND and machine.measured == 2
    assert asked(version, machine) == FOUND and machine.measured == 2


def test_a_folder_that_cannot_be_written_costs_a_measurement(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = publish(Store(tmp_path))
    (version.folder.parent / "tuned").write_text("a file where the folder belongs")
    assert asked(version, machine) == FOUND
    assert "could not be kept" in caplog.text and "Traceback" not in caplog.text
