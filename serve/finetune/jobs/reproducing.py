"""Trains a version again from what its lineage records, and compares the digest of the weights."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....exporters.inputs.samples import MAX_BYTES
from ....models.errors import BadInput, BadSamples, CannotServe, UnknownName
from ....models.store.manifest import sha256_of
from ....models.store.store import Store, Version
from ..data.files import UPLOADS
from .choices.hyperparameter_table import AUTO
from .job_rows import Asked, divide, lines_until
from .records.row_files import TRAINING, VALIDATION
from .training_request import TRAINER, TrainingPlace, training_request
from .worker_process import Child, JobFailed, result_of

Notify = Callable[[str], None]


class DataGone(BadInput):
    """The rows that a version was trained on are not in the store any more. It cannot be trained again from here."""

    code = "data_gone"


def reproduce(
    store: Store, version: Version, data: Path | None, validation: Path | None, notify: Notify,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Any]:  # fmt: skip
    """Train ``version`` again from its parent, rows, settings and seed; ``equal`` says whether the weights have the
    recorded digest. Nothing is published.

    ``data`` and ``validation``: copies of its files, where the store has them no more; ``max_bytes``: of each, and of
    what a packed one unpacks to. Raises DataGone, BadInput for a version that was not trained here, for files with
    other bytes or beyond that bound, CannotServe where the training fails.
    """
    lineage = version.manifest.get("lineage") or {}
    if lineage.get("by") != "fine-tuning" or "weights" not in lineage:
        raise BadInput(
            f"{version} was not fine-tuned here, so there is no training to repeat: its weights came with its folder"
        )
    try:
        parent = store.version(version.name, version.manifest["parent"])
    except UnknownName as error:
        raise BadInput(f"the version that {version} was trained from is gone: {error}") from error
    files = {TRAINING: _file(store, version, "--data", lineage["dataset"], data)}
    if (held_out := lineage.get("validation")) is not None:
        files[VALIDATION] = _file(store, version, "--validation", held_out, validation)
    hyperparameters = lineage["hyperparameters"] | _measured(lineage)
    asked = Asked(parent, files, hyperparameters, lineage["seed"], "normal", max_bytes)
    recorded = lineage.get("trained_with") or {}
    with tempfile.TemporaryDirectory(prefix="halfeven-reproduce-") as folder:
        place = TrainingPlace(
            recorded.get("device", "cpu"), recorded.get("threads", 1), "normal",
            processes=recorded.get("processes", 1),
        )  # fmt: skip
        try:
            rows = divide(asked, Path(folder), lambda child: lines_until(child, lambda: False))
        except BadSamples as error:
            raise BadInput(
                f"the rows of {version} cannot be read: {error}. Where the server that trained it had a larger "
                "HALFEVEN_MAX_UPLOAD_MIB, set that here too"
            ) from error
        request = training_request(parent, rows, hyperparameters, lineage["seed"], "again", place)
        done = _trained({**request, "checkpoint_bytes": 0}, Path(folder), notify)
    return {
        "version": str(version),
        "equal": done["digest"] == lineage["weights"],
        "recorded": lineage["weights"],
        "trained": done["digest"],
        "steps": done["summary"]["steps"],
        "differences": _differences(recorded, done["trained_with"]),
    }


def sentence_of(facts: Mapping[str, Any]) -> str:
    """The result for people."""
    if facts["equal"]:
        return (
            f"{facts['version']} trained again has the same weights, bit for bit ({facts['trained'][:16]}…)"
        )
    why = "; ".join(facts["differences"]) or (
        "library, device and threads are the same: either the model's code draws from a generator of its own, or the "
        "processor is another one"
    )
    return (
        f"{facts['version']} trained again has other weights: {facts['trained'][:16]}…, recorded are "
        f"{facts['recorded'][:16]}… ({why})"
    )


def _measured(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the trainer of the recorded job measured and chose for its settings "auto"."""
    summary, asked = lineage["scaler"], lineage["hyperparameters"]
    return {name: summary[name] for name in ("precision", "learning_rate") if asked.get(name) == AUTO}


def _file(store: Store, version: Version, option: str, digest: str, given: Path | None) -> Path:
    if given is not None:
        found = sha256_of(given) if given.is_file() else "no such file"
        if found != digest:
            raise BadInput(f"{option} {given}: expected the file with SHA-256 {digest}, got {found}")
        return given
    path = store.root / UPLOADS / digest
    if not path.is_file():
        raise DataGone(
            f"the rows that {version} was trained on (SHA-256 {digest}) are not in the store any more, so it cannot be "
            f"trained again; give the file with {option}"
        )
    if sha256_of(path) != digest:
        raise DataGone(
            f"{path} does not hold the rows that {version} was trained on; give them with {option}"
        )
    return path


def _trained(request: Mapping[str, Any], folder: Path, notify: Notify) -> Mapping[str, Any]:
    child, last, total = Child.of_module(TRAINER, request, folder / "train"), {}, 1
    for line in lines_until(child, lambda: False):
        total = line.get("total_steps", total)
        if line["type"] == "evaluation":
            notify(f"step {line['step']} of {total}")
        last = line
    try:
        return result_of(child, last if last.get("type") in ("done", "failed") else {}, "trainer")
    except JobFailed as error:
        raise CannotServe(f"the training failed: {error.code}: {error}") from error


def _differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {recorded[name]} and is {now.get(name)}"
        for name in recorded
        if recorded[name] != now.get(name)
    ]
