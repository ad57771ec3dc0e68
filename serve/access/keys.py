"""A key of the server: how one is made, what is kept of it, and what it allows.

A key is ``hek_ID_SECRET``. The identifier is public and finds the record; the secret is 256 random bits. The record has
the SHA-256 of the whole key: a slow password hash protects words that can be guessed, and 256 random bits cannot be.
"""

import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...models.errors import BadInput
from ...models.folder.model_name import NAME

INFER, TRAIN, MANAGE, METRICS = SCOPES = ("infer", "train", "manage", "metrics")
Owners = tuple[str, ...] | None  # of objects: identifiers of keys; None: every owner
EVERY_MODEL = "*"  # what concerns all models together; no model's name
_PREFIX = "hek"
_NO_DIGEST = "0" * 64  # compared where no record is found, so that both cases take the same time


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The stored facts of a key. A key without ``models`` is for all models.

    ``rate``: requests per second, ``concurrency``: requests at once; None: no limit. ``created_at``: Unix seconds.
    """

    id: str
    name: str
    sha256: str
    scopes: tuple[str, ...]
    models: tuple[str, ...] = ()
    rate: float | None = None
    concurrency: int | None = None
    created_at: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "KeyRecord":
        """Raises TypeError, ValueError, KeyError or BadInput where ``data`` is no record."""
        if not all(isinstance(data.get(field, []), list) for field in ("scopes", "models")):
            raise ValueError("the scopes and the models of a key are lists")
        record = cls(**{**data, "scopes": tuple(data["scopes"]), "models": tuple(data.get("models", ()))})
        texts = (record.id, record.name, record.sha256, *record.scopes, *record.models)
        if not all(isinstance(text, str) for text in texts) or len(record.sha256) != len(_NO_DIGEST):
            raise ValueError("a field that is a text in every key is none here")
        _check(record)
        return record

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def allows(self, scopes: Collection[str], model: str | None = None) -> bool:
        """True if the key has one of ``scopes`` and is for the model; None: no model is concerned."""
        return any(scope in scopes for scope in self.scopes) and self.reaches(model)

    def reaches(self, model: str | None) -> bool:
        return model is None or not self.models or model in self.models

    @property
    def owners(self) -> Owners:
        """Whose files and jobs the key may see: its own, and as a key for all models those that were made without a
        key. The operator's keys, for all models with `manage`, see every one."""
        if self.models:
            return (self.id,)
        return None if MANAGE in self.scopes else (self.id, "")


class Keys:
    """All records, found by a key."""

    def __init__(self, records: Iterable[KeyRecord] = ()) -> None:
        self.by_id = {record.id: record for record in records}

    def find(self, key: str) -> KeyRecord | None:
        """The record of a key, None where there is none. The digests are compared in constant time."""
        record = self.by_id.get(_id_of(key))
        known = _NO_DIGEST if record is None else record.sha256
        return record if hmac.compare_digest(_sha256(key), known) else None


def new_key(
    name: str,
    scopes: Iterable[str],
    models: Iterable[str],
    rate: float | None,
    concurrency: int | None,
    created_at: int,
) -> tuple[str, KeyRecord]:
    """A key, which is kept nowhere, and its record. Raises BadInput naming what does not fit."""
    id = secrets.token_hex(6)
    key = f"{_PREFIX}_{id}_{secrets.token_urlsafe(32)}"
    # Each once, in the order of SCOPES or as they came: a list that is read by people.
    chosen = tuple(dict.fromkeys(scopes))
    record = KeyRecord(
        id, name, _sha256(key), chosen, tuple(dict.fromkeys(models)), rate, concurrency, created_at
    )
    _check(record)
    return key, record


def _check(record: KeyRecord) -> None:
    if not NAME.fullmatch(record.name):
        raise BadInput(
            f"key name {record.name[:128]!r}: expected letters, digits and . _ - after a letter or digit, "
            "at most 128 in all"
        )
    unknown = [scope for scope in record.scopes if scope not in SCOPES]
    if unknown or not record.scopes:
        raise BadInput(f"--scope {', '.join(unknown)[:80] or 'is missing'}: expected {', '.join(SCOPES)}")
    if wrong := [model for model in record.models if not NAME.fullmatch(model)]:
        raise BadInput(f"--model {wrong[0][:128]!r} is no model's name; leave --model away for all models")
    if record.rate is not None and not 0 < record.rate <= 1e6:
        raise BadInput(f"--rate {record.rate}: expected requests per second, above 0 to 1,000,000")
    if record.concurrency is not None and not 1 <= record.concurrency <= 1_000_000:
        raise BadInput(f"--concurrency {record.concurrency}: expected requests at once, 1 to 1,000,000")


def _id_of(key: str) -> str:
    parts = key.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else ""


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()
