"""A choice that a job leaves to measurement is made once: whatever ends the job, it goes on with the same choice."""

import json
from pathlib import Path

import pytest

from tests.serve.finetune.training.hard_training import HARD, elsewhere, hard_job
from tests.serve.finetune.training.trainer_runs import Line, run


def rates(lines: list[Line]) -> set[float]:
    return {line["learning_rate"] for line in lines if line["type"] == "step"}


@pytest.mark.slow
def test_a_job_with_auto_is_the_job_that_names_what_was_chosen(tmp_path: Path) -> None:
    named = hard_job(tmp_path / "job") | {"precision": "fp32"}
    auto = named | {"hyperparameters": {**HARD, "learning_rate": "auto"}}
    lines, _ = run(elsewhere(auto))
    chosen = next(line for line in lines if line["type"] == "chosen")
    assert chosen["learning_rate"] == lines[-1]["summary"]["learning_rate"] and len(chosen["losses"]) == 7
    again, _ = run(named | {"hyperparameters": {**HARD, "learning_rate": chosen["learning_rate"]}})
    assert again[-1]["digest"] == lines[-1]["digest"], "the range test leaves no trace"


@pytest.mark.slow
def test_what_was_chosen_is_not_measured_again(tmp_path: Path) -> None:
    auto = hard_job(tmp_path / "job") | {"precision": "auto"}
    auto |= {
        "hyperparameters": {**HARD, "learning_rate": "auto", "schedule": "constant", "warmup_ratio": 0.0}
    }
    chosen = {"precision": "fp16", "seconds": {}, "learning_rate": 0.00321, "steps": 10, "losses": {}}
    (Path(auto["out"]) / "chosen.json").write_text(json.dumps(chosen))
    lines, _ = run(auto)
    assert rates(lines) == {0.00321} and lines[-1]["summary"]["precision"] == "fp16"


@pytest.mark.slow
def test_a_trial_of_a_few_steps_takes_the_usual_rate_without_a_test(tmp_path: Path) -> None:
    auto = hard_job(tmp_path / "job") | {
        "hyperparameters": {**HARD, "learning_rate": "auto"},
        "trial_steps": 2,
    }
    lines, _ = run(auto)
    assert [line["type"] for line in lines] == ["tried"] and lines[0]["steps"] == 2
    assert not (Path(auto["out"]) / "chosen.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "possible"), [("O1", {"fp32", "fp16", "bf16"}), ("O2", {"fp16", "bf16"})], ids=["O1", "O2"]
)
def test_the_precision_of_a_job_is_measured_and_the_event_has_what_that_cost(
    tmp_path: Path, level: str, possible: set[str]
) -> None:
    job = hard_job(tmp_path / "job") | {"precision": "auto", "hyperparameters": {**HARD, "opt_level": level}}
    model = Path(job["source"]["folder"]) / "model.py"
    # This leaves a half tensor half.
    model.write_text(model.read_text().replace("torch.rand(1)", "torch.rand(())"))
    lines, _ = run(job | {"fp32_modules": ["la*"]})
    assert lines[-1]["type"] == "done", lines[-1]
    named = {"last": "fp32_modules names it"}
    assert lines[0]["in_fp32"] == (named if level == "O1" else {"norm": "a BatchNorm1d"} | named)
    chosen = next(line for line in lines if line["type"] == "chosen")
    assert chosen["precision"] == lines[-1]["summary"]["precision"] in possible
    assert chosen["seconds"].keys() | {one["precision"] for one in chosen["left_out"]} == possible
    assert chosen["took_seconds"] > 0
