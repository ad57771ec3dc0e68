"""The request of a job to the trainer's process."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....models.archive.archive import save_program
from ....models.engines.torch_engine import original_program
from ....models.folder.loss_and_optimizer_names import DEFAULT
from ....models.spec.spec import ModelSpec
from ....models.store.store import Version
from ..training.loop.setting_names import NONE, STATE_FILE
from .choices.declared_steps import OF_OPTIMIZERS, declared_steps
from .choices.hyperparameter_table import QUARANTINE
from .choices.loss_choice import losses_by_output
from .choices.trainable import trainable_of
from .job_rows import JobRows
from .records.row_files import HELD_OUT, ROWS
from .worker_process import Priority

NEEDED = ("weights.safetensors", "original.pt2")  # files of a version that can be trained
TRAINER = "halfeven.serve.finetune.training.trainer"
_AMP = (
    "n_epochs", "batch_size", "learning_rate", "weight_decay", "clip_norm", "init_scale", "growth_interval",
    "growth_factor", "backoff_factor",
    "scale_floor", "max_floor_hits", "bad_rows", "schedule", "warmup_ratio", "schedule_power", "schedule_period",
    "schedule_gamma", "ema_decay", "opt_level", "optimizer", "learning_rates",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingPlace:
    """The device of a training, and its processes: ``processes`` train together, each with ``threads`` threads and
    ``priority``; all together may have ``memory_bytes`` of private memory (0: no limit)."""

    device: str
    threads: int
    priority: Priority
    memory_bytes: int = 0
    processes: int = 1


def training_request(
    parent: Version,
    rows: JobRows,
    hyperparameters: Mapping[str, Any],
    seed: int,
    job: str,
    place: TrainingPlace,
) -> dict[str, Any]:
    """The request that trainer.py reads. Writes the parent's program and weights into the folder of the ``rows``; the
    operator's module comes from the version's own stored source."""
    declared = parent.manifest.get("training", {})
    return {
        "job": job,
        **_files(parent, rows.folder, hyperparameters),
        **_signature(parent.spec()),
        **_losses(parent, rows, declared, hyperparameters),
        **_processes(place, hyperparameters),
        **_settings(parent, hyperparameters),
        **trainable_of(parent, hyperparameters, rows.losses),
        "left_out": rows.left_out,
        "transform": declared.get("transform"),
        "fp32_modules": declared.get("fp32_modules", []),
        "optimizer_function": None if hyperparameters.get("optimizer") else declared.get("optimizer"),
        "seed": seed,
    }


def _files(parent: Version, folder: Path, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    save_program(original_program(parent), folder / "original.pt2", weights=True)
    warm = hyperparameters.get("warm_start", NONE) != NONE and parent.has(STATE_FILE)
    return {
        "source": {"folder": str(parent.folder / "source"), **parent.manifest["source"]},
        "program": str(folder / "original.pt2"),
        "weights": str(_copied(parent, "weights.safetensors", folder / "parent.safetensors")),
        "warm": str(_copied(parent, STATE_FILE, folder / f"parent_{STATE_FILE}")) if warm else None,
        "data": str(folder / "data.safetensors"),
        "held_out": str(folder / HELD_OUT),
        "rows_file": str(folder / ROWS),
        "out": str(folder),
    }


def _signature(spec: ModelSpec) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": t.name, "dims": [[dim.minimum, dim.maximum] for dim in t.shape]} for t in spec.inputs
        ],
        "outputs": [tensor.name for tensor in spec.outputs],
        "batch_axes": spec.batch_axes,
        "max_batch_size": spec.max_batch_size,
    }


def _losses(
    parent: Version, rows: JobRows, declared: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "losses": losses_by_output(parent.spec(), rows.losses, declared.get("loss"), hyperparameters),
        "class_weights": hyperparameters.get("class_weights"),
        "label_smoothing": hyperparameters.get("label_smoothing", 0.0),
        "pos_weight": hyperparameters.get("pos_weight"),
        "missing_targets": hyperparameters.get("missing_targets"),
    }


def _processes(place: TrainingPlace, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's processes: only one where rows that spoil a step are searched for (`Passes.culprits`)."""
    processes = 1 if hyperparameters.get("bad_rows") == QUARANTINE else place.processes
    return {
        "device": place.device,
        "threads": place.threads,
        "priority": place.priority,
        "memory_limit_bytes": place.memory_bytes // processes,
        "processes": processes,
    }


def _settings(parent: Version, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    steps, batch_size = declared_steps(parent), hyperparameters["batch_size"]
    read = [name for name in _AMP if steps is None or name not in OF_OPTIMIZERS]
    of_the_loop = _of_the_loop({name: hyperparameters[name] for name in read if name in hyperparameters})
    return {
        "keep_state": hyperparameters.get("keep_state", NONE),
        "warm_start": hyperparameters.get("warm_start", NONE),
        "pass_rows": batch_size,
        "precision": hyperparameters["precision"],
        "hyperparameters": of_the_loop | {"batch_size": batch_size * hyperparameters.get("accumulation", 1)},
        "declared_steps": steps,
        "checkpoint_every": hyperparameters.get("checkpoint_every", 0),
        "patience": hyperparameters.get("early_stopping_patience", 0),
    }


def _copied(parent: Version, file: str, copy: Path) -> Path:
    with parent.opened(file) as stored, copy.open("wb") as written:
        shutil.copyfileobj(stored.handle, written)
    return copy


def _of_the_loop(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as `Settings` has them: the optimizer's name, and its arguments apart."""
    named = values.get("optimizer") or {"name": DEFAULT}
    arguments = {name: value for name, value in named.items() if name != "name"}
    return {**values, "optimizer": named["name"], "optimizer_args": arguments}
