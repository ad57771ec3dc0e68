"""A checked request and its answer as bytes for the channel: a JSON head, and the tensors as they lie in memory."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from ...models.datatypes import DATATYPES
from ...models.spec import ModelSpec
from ..batching.interface import NO_TERMS, Answer, Terms
from .ring import Buffer

ASK, CANCEL, ANSWER, REFUSE, OTHER_SPEC, MODELS, WRITTEN = range(1, 8)  # the kinds of messages
_LENGTH = struct.Struct("<I")
_ALIGN = 16  # bytes; where each tensor begins
_NUMPY = {datatype.numpy.name: datatype.numpy for datatype in DATATYPES.values()}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that a worker has read with the spec of that ``digest``. ``authorization`` is the caller's header."""

    name: str
    version: str | None
    digest: str
    authorization: str | None
    rows: int
    arrays: Sequence[np.ndarray]
    terms: Terms = NO_TERMS


def ask_parts(ask: Ask) -> list[Buffer]:
    terms = ask.terms
    head = {
        "name": ask.name,
        "version": ask.version,
        "digest": ask.digest,
        "authorization": ask.authorization,
        "rows": ask.rows,
        "terms": None
        if terms is NO_TERMS
        else (terms.priority, terms.timeout_ns, terms.deterministic, terms.key),
    }
    return _parts(head, ask.arrays)


def read_ask(data: Buffer) -> Ask:
    head, arrays = _read(data)
    terms = head["terms"]
    return Ask(
        head["name"],
        head["version"],
        head["digest"],
        head["authorization"],
        head["rows"],
        arrays,
        NO_TERMS if terms is None else Terms(*terms),
    )


def answer_parts(answer: Answer) -> list[Buffer]:
    prepared = answer.prepared
    head = {
        "by": (prepared.version, prepared.digest, prepared.precision),
        "times": (answer.queue_ns, answer.compute_ns, answer.assemble_ns),
        "rows": (answer.batch_rows, answer.rescued),
    }
    return _parts(head, answer.outputs)


def read_answer(data: Buffer) -> tuple[Mapping[str, Any], list[np.ndarray]]:
    """The head that `answer_parts` wrote, and the outputs."""
    return _read(data)


def refusal_parts(status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> list[Buffer]:
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    return _parts({"status": status, "headers": texts}, [np.frombuffer(body, np.uint8)])


def read_refusal(data: Buffer) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    head, (body,) = _read(data)
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
    return head["status"], headers, body.tobytes()


def models_parts(models: Mapping[str, tuple[str, ModelSpec]], starting: bool) -> list[Buffer]:
    """``models``: the digest and the spec by name; ``starting``: models of the store are still being made ready."""
    texts = {name: (digest, spec.to_json()) for name, (digest, spec) in models.items()}
    return [orjson.dumps({"models": texts, "starting": starting})]


def _parts(head: dict[str, Any], arrays: Sequence[np.ndarray]) -> list[Buffer]:
    head["tensors"] = [(_NAMES[array.dtype], array.shape) for array in arrays]
    text = orjson.dumps(head)
    at = _LENGTH.size + len(text)
    parts: list[Buffer] = [_LENGTH.pack(len(text)), text]
    for array in arrays:
        parts.append(bytes(-at % _ALIGN))
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        at += -at % _ALIGN + array.nbytes
    return parts


def _read(data: Buffer) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The head, and the tensors as views of ``data``."""
    at = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    head = orjson.loads(memoryview(data)[_LENGTH.size : at])
    arrays: list[np.ndarray] = []
    for name, shape in head["tensors"]:
        at += -at % _ALIGN
        arrays.append(array := np.ndarray(shape, _NUMPY[name], data, at))
        at += array.nbytes
    return head, arrays
