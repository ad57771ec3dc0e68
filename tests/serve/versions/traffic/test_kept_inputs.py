"""Inputs of live traffic on which a half drifts are kept where the operator asks for it, and judge the next one."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from halfeven.exporters.conversion import road
from halfeven.exporters.conversion.convert import Conversion, Options, convert
from halfeven.exporters.inputs.drifted_inputs import folder_of
from halfeven.exporters.inputs.samples import stored_samples
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import Store
from halfeven.serve.cli import parity_command
from halfeven.serve.cli.parity_command import judge_again
from halfeven.serve.versions.orders import drifted, events
from halfeven.serve.versions.traffic.comparison import Scale
from halfeven.serve.versions.traffic.drift import Drift, as_samples, worst_rows
from halfeven.serve.versions.traffic.rules import TrialRules

from tests.model_folders import samples_of, write_folder
from tests.patience import until
from tests.serve.versions.traffic.conftest import serving, traffic
from tests.specs import tensor

WAVE = """
import torch
from torch import nn

class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return torch.sin(self.net(x))

def build():
    return Wave()
"""
FAR = 200.0  # times as large as the samples: there a half has lost the angle
MOST = 6


def converted(store: Store) -> Conversion:
    return convert(store.root / "net", store, Options(forms=("torch",)))


def drifts(store: Store) -> int:
    return sum(event["kind"] == "drift" for event in events(store, "net", 1000))


def replayed(store: Store, rows: dict[str, np.ndarray], keep_drifted: int) -> int:
    """The drifts that a server notes while it answers the rows, each of which its original answers too."""
    noted = drifts(store)
    with serving(store, parity_sample=1.0, keep_drifted=keep_drifted) as (address, roster):
        served: Any = roster.find("net")
        drift = served.traffic.stable.drift
        with traffic(address, 2, rows) as callers:
            until(lambda: callers.answered > 100)
            until(lambda: drift is None or drifts(store) > noted or drift.numbers()["recent"] == 50)
        assert callers.failed == 0
    return drifts(store) - noted


@pytest.mark.slow
def test_what_drifted_is_kept_and_a_shifted_replay_drifts_once_and_not_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    write_folder(store.root / "net", WAVE, max_batch_size=8, form="torch", samples=samples_of({"x": [4]}, 32))
    first = converted(store)
    assert first.any_passed and converted(store).unchanged
    far = {"x": FAR * samples_of({"x": [4]}, 16)["x"]}
    assert replayed(store, far, MOST) == 1
    files = list(folder_of(store, "net").iterdir())
    assert 0 < len(files) <= MOST and all(file.stat().st_mode & 0o777 == 0o600 for file in files)

    judged = Mock(side_effect=parity_command.reprove)
    monkeypatch.setattr(parity_command, "reprove", judged)
    again = judge_again("net@1", store, None, "cpu", print)
    assert judged.call_args.args[3].judging.count == 16 + len(files)
    assert not again["forms"]["torch"]["passed"], "the half is not let in again: it is judged on them too"
    assert drifted(first.version, "cpu") is not None

    handed = Mock()
    monkeypatch.setattr(road, "hand_over", handed)
    second = converted(store)
    assert not second.unchanged and converted(store).unchanged
    stored = stored_samples(second.version)
    rows = stored.arrays["x"]
    assert len(rows) == 32 + len(files) and stored.drifted == len(files)
    file = "samples.safetensors"
    modes = [done.version.path(file).stat().st_mode & 0o777 for done in (first, second)]
    assert modes == [0o644, 0o600]
    handed.assert_called_once()
    assert all((row == far["x"]).all(axis=1).any() for row in rows[: len(files)])
    assert any(note.startswith("inputs of live traffic") for note in second.facts["notes"])
    assert replayed(store, far, MOST) == 0


@pytest.mark.slow
def test_nothing_is_kept_unless_the_operator_asks_for_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    write_folder(store.root / "net", WAVE, max_batch_size=8, form="torch", samples=samples_of({"x": [4]}, 32))
    converted(store)
    assert replayed(store, {"x": FAR * samples_of({"x": [4]}, 16)["x"]}, 0) == 1
    assert not folder_of(store, "net").exists()


def test_of_a_request_the_rows_that_differ_most_are_kept(random: np.random.Generator) -> None:
    scores, labels = random.standard_normal((12, 3)), np.arange(12)
    half = scores.copy(), labels.copy()
    half[0][2, 1] = np.nan  # no number where the original has one
    half[0][[5, 9]] += 1e-3
    half[0][7] += 1e-5
    scores[4, 0] = half[0][4, 0] = np.nan  # and one where both have none
    half[1][11] = 0
    assert worst_rows(half, (scores, labels)).tolist() == [2, 5, 9, 11]


def test_the_half_falls_back_before_inputs_are_written_also_where_answers_differ_in_shape() -> None:
    spec = ModelSpec("net", (tensor("x", "FP32", -1, 4),), (tensor("y", "FP32", -1, "n"),), 8)
    done = list[Any]()
    drift = Drift(
        spec, Mock(), Mock(), Scale(2**-11, {}), TrialRules(drift_over=1), Mock(), done.append, done.append
    )  # fmt: skip
    sent = np.arange(24, dtype=np.float32).reshape(6, 4)
    half, original = (Mock(outputs=[np.ones((6, size), np.float32)]) for size in (2, 3))
    drift._compare([sent], half, original)
    numbers, (kept,) = done
    assert numbers["over_limit"] == numbers["recent_over"] == 1
    assert kept.tolist() == sent[:4].tolist()


def test_inputs_are_kept_in_the_datatypes_of_the_model_one_by_one() -> None:
    wired = ModelSpec(
        "net", (tensor("x", "FP32", -1, 4, wire=Wire("UINT8", 0.5, 1.0)),), (tensor("y", "FP32", -1, 2),), 8
    )
    sent = np.arange(8, dtype=np.uint8).reshape(2, 4)
    found = list(as_samples(wired, [sent]))
    assert [one["x"].tolist() for one in found] == [(sent[at : at + 1] * 0.5 + 1).tolist() for at in (0, 1)]
    alone = ModelSpec("net", (tensor("x", "FP32", 4),), (tensor("y", "FP32", 2),), 0)
    (one,) = as_samples(alone, [np.ones(4, np.float32)])
    assert one["x"].shape == (1, 4)
