"""The gate's verdicts on devices other than the one that converted a version. They are stored beside the version, shown
in its report, and reused at the next start of a server.

    <store>/models/<name>/proofs-<number>.json     the newest per form, batch sizes and environment

A proof holds for one file of a form, at the batch sizes that were judged, on one kind of device with one driver, one
cuDNN and one set of libraries (`environment.py`). Anything else is proven anew.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.files.durable import replace_text
from ...models.files.stored_json import stored_json
from ...models.spec.buckets import buckets_of
from ...models.store.store import Version
from ..gate.verdict import ParityReport
from .environment import environment

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("halfeven.roster")
MOST_KEPT = 32  # the newest


@dataclass(frozen=True, slots=True)
class DeviceProof:
    """``form`` and ``digest``: of the half (`Version.sha256_of_form`); ``buckets``: the sizes that batches are filled
    up to there (empty: any size is run); ``batch_sizes``: those that were judged; ``at``: ISO 8601; ``kernels``: as
    `kernels_of`."""

    form: str
    digest: str
    environment: Mapping[str, Any]
    buckets: Sequence[int]
    batch_sizes: Sequence[int]
    passed: bool
    summary: str
    at: str
    kernels: Sequence[str] = ()

    @property
    def _holds_for(self) -> tuple[Any, ...]:
        return self.form, self.digest, dict(self.environment), list(self.buckets), list(self.kernels)

    def same_terms(self, other: "DeviceProof") -> bool:
        return self._holds_for == other._holds_for


def kernels_of(form: str, precision: str, device: "torch.device | str") -> Sequence[str]:
    """The kernels that a server chooses from for a half, where there are several: all of them are judged. Only those
    half weights are packed that are in bf16 (`models/engines/cpu/packed.py`)."""
    return ("plain", "packed") if (form, precision, str(device)) == ("torch", "bf16", "cpu") else ()


def proofs_of(version: Version) -> list[DeviceProof]:
    """All that are kept, the newest last; none where the file cannot be read."""
    path = _path(version)
    try:
        found = [DeviceProof(**entry) for entry in stored_json(path)]
        lists = all(
            isinstance(several, list)
            for proof in found
            for several in (proof.buckets, proof.batch_sizes, list(proof.kernels))
        )
        if not (
            lists and all(type(one.passed) is bool and isinstance(one.environment, dict) for one in found)
        ):
            raise ValueError("a proof has no verdict, no environment or no sizes")
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s is not a file of proofs and is left aside: %s", path, error)
        return []


def kept_proof(version: Version, form: str, file: str, device: "torch.device") -> DeviceProof | None:
    """The proof of this form that holds on this device as it is now; None where there is none."""
    terms = _proof(version, form, file, device, None)
    return next((proof for proof in reversed(proofs_of(version)) if proof.same_terms(terms)), None)


def keep_proof(version: Version, form: str, file: str, device: "torch.device", report: ParityReport) -> None:
    """Keep what the gate found. Where the disk is full or read-only, the next start proves again."""
    found = _proof(version, form, file, device, report)
    others = [proof for proof in proofs_of(version) if not proof.same_terms(found)]
    kept = [asdict(proof) for proof in (*others, found)][-MOST_KEPT:]
    try:
        replace_text(_path(version), json.dumps(kept, indent=2, allow_nan=False))
    except OSError as error:
        logger.error(
            "the proof of %s on %s could not be kept in %s: %s",
            version,
            device,
            _path(version),
            error.strerror,
        )


def _proof(
    version: Version, form: str, file: str, device: "torch.device", report: ParityReport | None
) -> DeviceProof:
    return DeviceProof(
        form,
        version.sha256_of_form(file),
        environment(device),
        list(buckets_of(version.spec(), str(device))),
        list(report.batch_sizes) if report else [],
        report is not None and report.passed,
        report.summary() if report else "",
        datetime.now(UTC).isoformat(timespec="seconds"),
        kernels_of(form, version.manifest["half"], device),
    )


def _path(version: Version) -> Path:
    return version.folder.parent / f"proofs-{version.number}.json"
