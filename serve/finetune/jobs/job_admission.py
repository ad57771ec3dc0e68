"""The checks of a job's request before the job exists: afterwards its caller has gone, and a failure costs hours."""

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ....models.errors import BadInput
from ....models.nearest_name import nearest_name
from ....models.store.store import Store, Version
from ...access.access_control import OPEN, Permit
from ..data.datasets import learnable_outputs
from ..data.files import Files
from .choices.declared_steps import check_settings
from .choices.hyperparameters import asked_hyperparameters, is_setting, read_hyperparameters, resolve
from .concluding import ends_stale
from .job_rows import Asked, check
from .records.job_store import JobStore
from .records.job_types import FileRecord, JobRequest
from .records.row_files import TRAINING, VALIDATION
from .training_request import NEEDED

_KEYS = (
    "model", "training_file", "validation_file", "hyperparameters", "method", "seed", "suffix", "metadata",
    "integrations",
)  # fmt: skip
_MAX_SEED = 2**31 - 1
_MAX_SUFFIX, _MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 64, 16, 64, 512  # characters and pairs: OpenAI's bounds


class BadJob(BadInput):
    """The request for a job is refused. ``param`` names the part of its request to correct."""

    code = "bad_job"


class JobAdmission:
    """Reads a job's request and checks everything that it names against the model. Blocks for the disk, and for the
    process that reads the files (`job_rows.py`).

    One request at a time: a training file is read whole, and ten of them at once would not fit into memory.
    ``leaving``: the server is shutting down.
    """

    def __init__(
        self, job_store: JobStore, files: Files, store: Store, leaving: Callable[[], bool] = lambda: False
    ) -> None:
        self._job_store, self._files, self._store, self._leaving = job_store, files, store, leaving
        self._reading = threading.Lock()

    def read(self, asked: Any, permit: Permit = OPEN) -> JobRequest:
        """The job, which belongs to the key of ``permit`` and has files that this key may see.

        Raises BadInput (BadJob, BadHyperparameter, BadTrainingFile) with its ``param``, UnknownName."""
        body = _table(asked)
        model, training_file = (_text(body, key) for key in ("model", "training_file"))
        validation_file = _text(body, "validation_file", needed=False)
        values = read_hyperparameters(body)
        seed = _seed(body)
        suffix, metadata = _suffix(body), checked_metadata(body.get("metadata"))
        assert model and training_file
        parent = self._parent(model)
        check_settings(parent, asked_hyperparameters(body), values)
        given = {TRAINING: training_file, VALIDATION: validation_file}
        records = {
            param: self._job_store.usable_file(id, permit.owners)
            for param, id in given.items()
            if id is not None
        }
        rows, findings = self._check_data(parent, records, values, seed)
        if why := ends_stale(parent, self._store.live_number(parent.name), values["stale_parent"]):
            findings.append(why)
        return JobRequest(
            model=model,
            name=parent.name,
            parent_version=parent.number,
            training_file=training_file,
            validation_file=validation_file,
            hyperparameters=resolve(values, rows, parent.spec().max_batch_size),
            seed=seed,
            suffix=suffix,
            metadata=metadata,
            asked=body,
            findings=tuple(findings),
            owner=permit.owner,
        )

    def _parent(self, model: str) -> Version:
        """``name`` is the active version, ``name@version`` that one."""
        name, at, number = model.partition("@")
        self._store.known(name)
        parent = self._store.numbered(name, number) if at else self._store.live(name)
        if parent is None:
            raise _bad(
                "model",
                f"'{name}' has no active version; name one of {self._store.numbers(name)}: '{name}@N'",
            )
        if parent.spec().form == "live":
            raise _bad(
                "model",
                f"{parent} is served live: it has no captured program that could be trained and converted here; "
                "train the module yourself and convert its folder with the new weights",
            )
        learnable_outputs(parent.spec())
        if parent.has("original.onnx") and not parent.has("original.pt2"):
            raise _bad(
                "model",
                f"{parent} came from an ONNX file, which holds no program that could be trained: fine-tune the model "
                "that it was written from, or convert that one",
            )
        if missing := [file for file in NEEDED if not parent.has(file)]:
            raise _bad(
                "model", f"{parent} has no {missing[0]}, so it cannot be trained; convert the model again"
            )
        return parent

    def _check_data(
        self,
        parent: Version,
        records: Mapping[str, FileRecord],
        values: dict[str, Any],
        seed: int,
    ) -> tuple[int, list[str]]:
        """Check the files against the spec; gives the number of rows to train on, and findings.

        ``values``: the hyperparameters, of which ``validation_split`` becomes a number.
        """
        files = {param: self._files.path(record.sha256) for param, record in records.items()}
        names = {param: f"'{record.filename}' ({record.id})" for param, record in records.items()}
        asked = Asked(parent, files, values, seed, max_bytes=self._files.max_bytes)
        with self._reading:
            found = check(asked, names, self._files.folder, self._leaving)
        values["validation_split"] = found["validation_split"]
        return found["train"], found["findings"]


# The request's own fields.


def _table(asked: Any) -> dict[str, Any]:
    if not isinstance(asked, dict):
        raise BadJob('expected a JSON object such as {"model": "digits", "training_file": "file-…"}')
    for key in asked:
        if key not in _KEYS and is_setting(key):
            raise _bad(key, f'is a setting: expected it in {{"hyperparameters": {{"{key}": …}}}}')
        if key not in _KEYS:
            near = nearest_name(key, _KEYS)
            raise _bad(key[:80], f"the key is unknown; the nearest known one is '{near}'")
    if asked.get("integrations"):
        raise _bad(
            "integrations", "not offered: nothing here calls another machine; see /metrics and the events"
        )
    return asked


def _text(body: Mapping[str, Any], key: str, needed: bool = True) -> str | None:
    value = body.get(key)
    if value is None and not needed:
        return None
    if not isinstance(value, str) or not value:
        came = "nothing" if value is None else repr(value)[:80]
        raise _bad(key, f"expected a string, got {came}")
    return value


def _seed(body: Mapping[str, Any]) -> int:
    seed = body.get("seed")
    if seed is None:
        return secrets.randbelow(_MAX_SEED + 1)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _MAX_SEED:
        raise _bad("seed", f"expected a whole number from 0 to {_MAX_SEED}, got {seed!r:.80}")
    return seed


def _suffix(body: Mapping[str, Any]) -> str | None:
    suffix = _text(body, "suffix", needed=False)
    if suffix is not None and len(suffix) > _MAX_SUFFIX:
        raise _bad("suffix", f"expected at most {_MAX_SUFFIX} characters, got {len(suffix)}")
    return suffix


def checked_metadata(metadata: object) -> dict[str, str] | None:
    """The pairs of a job, or those by which jobs are looked for. Raises BadJob for too many or too long ones."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or len(metadata) > _MAX_PAIRS:
        raise _bad("metadata", f"expected an object of at most {_MAX_PAIRS} pairs, got {metadata!r:.80}")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            raise _bad(
                "metadata",
                f"expected strings, keys of at most {_MAX_KEY} and values of at most {_MAX_VALUE} characters, got "
                f"{key!r:.80}: {value!r:.80}",
            )
    return metadata


def _bad(param: str, fault: str) -> BadJob:
    return BadJob(f"{param}: {fault}", param)
