"""Checkpoints on the disk: whole or not there, bounded, and refused by name where damaged or of another job."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training import checkpoints as module
from halfeven.serve.finetune.training.checkpoints import (
    CORRUPT,
    FOREIGN,
    KEPT,
    Checkpoint,
    Checkpoints,
    Identity,
    OtherData,
)
from halfeven.serve.finetune.training.training_job import identity_of

OURS = Identity("ftjob-1", "settings", "rows")


class Killed(BaseException):
    """An end in place of a SIGKILL: no handler of errors may see it."""


def written(folder: Path, *steps: int, identity: Identity = OURS) -> Checkpoints:
    made = Checkpoints(folder, identity)
    for step in steps:
        assert write(made, step) is None
    return made


def write(made: Checkpoints, step: int) -> str | None:
    made.log.append({"step": step})
    tensors = {"module:weight": torch.full((3,), float(step)), "generator:cpu": torch.get_rng_state()}
    return made.write(
        step, tensors, {"done": step, "scale": 1 / 3}, {"weight": torch.full((3,), -float(step))}
    )


def last_good(folder: Path, identity: Identity = OURS) -> tuple[Checkpoint | None, list[str]]:
    found, refused = Checkpoints(folder, identity).last_good()
    return found, [one.code for one in refused]


def step_of(found: Checkpoint | None) -> int:
    assert found is not None
    step = found.numbers["done"]
    assert torch.equal(found.tensors["module:weight"], torch.full((3,), float(step)))
    assert torch.equal(found.best["weight"], torch.full((3,), -float(step)))
    assert found.numbers["scale"] == 1 / 3
    return step


def test_the_newest_is_read_back_bit_for_bit_and_only_a_few_are_kept(tmp_path: Path) -> None:
    made = written(tmp_path, 10, 20, 30, 40)
    found, refused = last_good(tmp_path)
    assert (step_of(found), refused) == (40, [])
    assert [place.name for place in made.places()] == ["step-00000030", "step-00000040"]
    assert len(made.places()) == KEPT
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.pkl"))


def test_a_newer_one_that_was_refused_goes_before_the_one_that_was_gone_on_from(tmp_path: Path) -> None:
    damage_state(written(tmp_path, 10, 20).places()[-1])
    again = Checkpoints(tmp_path, OURS)
    found, (refused,) = again.last_good()
    assert (step_of(found), refused.code) == (10, CORRUPT)
    again.log.cut(again.last_good()[0].numbers["log_bytes"])  # type: ignore[union-attr]
    write(again, 15)
    assert [place.name for place in again.places()] == ["step-00000010", "step-00000015"]


def test_wherever_a_write_is_killed_an_original_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call that reaches the disk does not come back, for every n until the write is done."""
    calls = {"left": 0}

    def kills(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **given: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Killed
            return real(*words, **given)

        return call

    for place, name in (
        (module, "fsync"),
        (module, "save_tensors"),
        (Path, "mkdir"),
        (Path, "write_text"),
        (Path, "rename"),
    ):
        monkeypatch.setattr(place, name, kills(getattr(place, name)))
    found = []
    for number in range(1, 100):
        calls["left"] = 0
        folder = tmp_path / str(number)
        made = written(folder, 10, 20)
        calls["left"] = number
        try:
            write(made, 30)
        except Killed:
            calls["left"] = 0
            last, refused = last_good(folder)
            assert refused == []
            found.append(step_of(last))
            write(made, 40)
            assert step_of(last_good(folder)[0]) == 40, "what the death left is not in the way"
            continue
        break
    assert set(found) == {20, 30} and found == sorted(found) and len(found) > 8


def damage_state(place: Path) -> None:
    data = bytearray((place / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "state.safetensors").write_bytes(data)


def damage_log(place: Path) -> None:
    log = place.parent / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]))  # the last line belongs to the last checkpoint alone


def no_manifest(place: Path) -> None:
    (place / "manifest.json").unlink()


def other_format(place: Path) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


def no_best(place: Path) -> None:
    (place / "best.safetensors").unlink()


@pytest.mark.parametrize("damage", [damage_state, damage_log, no_manifest, other_format, no_best])
def test_a_damaged_one_is_refused_and_the_one_before_is_used(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    made = written(tmp_path, 10, 20)
    damage(made.places()[-1])
    found, refused = last_good(tmp_path)
    assert (step_of(found), refused) == (10, [CORRUPT])


def test_of_another_job_or_other_settings_none_is_used(tmp_path: Path) -> None:
    written(tmp_path, 10, 20)
    for other in (replace(OURS, job="ftjob-2"), replace(OURS, settings="another learning rate")):
        assert last_good(tmp_path, other) == (None, [FOREIGN, FOREIGN])
    asked = {"rows": [3], "hyperparameters": {"learning_rate": 0.1}}
    assert identity_of(asked) != identity_of({**asked, "hyperparameters": {"learning_rate": 0.2}})


def test_made_from_other_rows_it_is_an_error_and_not_a_new_beginning(tmp_path: Path) -> None:
    written(tmp_path, 10)
    with pytest.raises(OtherData, match="create a new job"):
        last_good(tmp_path, replace(OURS, data="other rows"))


def test_what_does_not_fit_into_the_bound_is_not_written_and_says_so(tmp_path: Path) -> None:
    made = written(tmp_path, 10)
    size = sum(path.stat().st_size for path in made.places()[0].iterdir())
    made.most_bytes = 100
    assert "may have 100" in str(write(made, 20))
    assert step_of(last_good(tmp_path)[0]) == 10
    made.most_bytes = size + size // 2
    assert write(made, 30) is None
    assert [place.name for place in made.places()] == ["step-00000030"], "one fits, two do not"


@pytest.mark.parametrize("fault", [Killed(), OSError(28, "No space left on device")])
def test_the_last_good_one_stays_until_the_next_is_on_the_disk_though_both_exceed_the_bound(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = written(tmp_path, 10)
    made.most_bytes = sum(path.stat().st_size for path in made.places()[0].iterdir()) * 3 // 2

    def fails(*_: Any, **__: Any) -> None:
        raise fault

    with monkeypatch.context() as patched, suppress(Killed):
        patched.setattr(module, "save_tensors", fails)
        assert "No space left" in str(write(made, 20))
    assert step_of(last_good(tmp_path)[0]) == 10
    assert write(made, 30) is None
    assert [place.name for place in made.places()] == ["step-00000030"]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = written(tmp_path, 10)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_tensors", full)
    assert "No space left" in str(write(made, 20))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "step-00000010"]


def test_an_infinite_number_is_kept_and_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    made, endless = Checkpoints(tmp_path, OURS), {"groups": [{"growth_rate": math.inf}]}
    assert made.write(10, {}, endless, {}) is None
    assert "'groups.0.closure', which is of the type builtin_function" in str(
        made.write(20, {}, {"groups": [{"rate": 1.0, "closure": print}]}, {})
    )
    found, _ = last_good(tmp_path)
    assert found is not None and found.numbers["groups"] == endless["groups"]
