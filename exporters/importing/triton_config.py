"""Reads one model's ``config.pbtxt``: the settings that halfeven has too, and a sentence for every other field.

Fields: ``ModelConfig`` in https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...models.errors import BadFolder
from ...models.spec.spec import Batching
from .text_format import Message, Word, read_text_format

# Field → why it is not taken over, or what does the same in halfeven. Other fields are named without a reason.
REASONS = {
    "instance_group": "one instance runs, on the device that `halfeven serve --device` names",
    "optimization": "`halfeven tune` measures what is fastest",
    "model_warmup": "every version is run at its batch sizes before it serves",
    "sequence_batching": "requests are independent: callers send a state as an input and get it as an output",
    "model_transaction_policy": "one request has one answer",
    "response_cache": "answers are not cached",
    "parameters": "they are options of Triton's back end",
    "cc_model_filenames": "one file serves all devices",
    "batch_input": "callers send every input themselves",
    "batch_output": "answers are split along their batch axis",
    "priority_levels": "a request names one of two priorities itself",
    "default_priority_level": "a request names one of two priorities itself",
    "priority_queue_policy": "there is one policy for both priorities",
    "preserve_ordering": "answers leave as soon as they are ready",
    "preferred_batch_size": "a batch is what waits when the device is free; `buckets` in [batching] fills it up",
    "allow_timeout_override": "any request may name a timeout of its own",
    "timeout_action": "a request that waited too long is refused",
    "format": "tensors are taken as they come",
    "optional": "every request gives it",
    "allow_ragged_batch": "rows of one batch have equal sizes",
    "reshape": "requests have the shape that the file has",
}
MAX_RANK = 64  # numpy's
_TYPES = {"TYPE_STRING": "BYTES"}  # of the others the name follows TYPE_


@dataclass(frozen=True, slots=True)
class TritonTensor:
    """``dims`` without the batch, -1 where free; None: not stated. ``datatype`` as the protocol names it."""

    name: str
    datatype: str | None = None
    dims: tuple[int, ...] | None = None
    labels: str | None = None  # a file beside config.pbtxt


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """``max_batch_size`` None and no inputs or outputs: not stated, they are read from the model file.

    ``policy``: ("latest", number), ("all",) or ("specific", versions…). ``steps``: the models of an ensemble.
    ``left``: the fields that are not taken over, each a sentence.
    """

    backend: str | None = None
    file: str | None = None
    max_batch_size: int | None = None
    inputs: tuple[TritonTensor, ...] = ()
    outputs: tuple[TritonTensor, ...] = ()
    batching: Batching = field(default_factory=Batching)
    policy: tuple[Any, ...] = ("latest", 1)
    steps: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def read_config(path: Path, folder: Path) -> TritonConfig:
    """The configuration in a file of ``folder``.

    Raises BadFolder and TooLarge as `read_text_format` does, BadFolder for a field of the wrong type.
    """
    return _Config(path, read_text_format(path, folder)).read()


class _Config:
    """Removes each known field from a message as it reads it: the fields that remain are those not taken over."""

    def __init__(self, path: Path, message: Message) -> None:
        self.path, self.message = path, message
        self.left: list[str] = []

    def read(self) -> TritonConfig:
        top = self.message
        name = self.one(top, "name", str)
        if name and name != self.path.parent.name:
            self.left.append(f"name: '{name}', the folder's name '{self.path.parent.name}' is taken")
        platform, backend = self.one(top, "platform", str), self.one(top, "backend", str)
        file, rows = self.one(top, "default_model_filename", str), self.one(top, "max_batch_size", int)
        if rows is not None and not 0 <= rows <= 65536:
            raise BadFolder(f"{self.path}: max_batch_size: {rows}: expected 0 (not batched) to 65536")
        steps = self.steps(top)
        config = TritonConfig(
            backend=backend or platform or ("ensemble" if steps else None) or None,
            file=file or None,
            max_batch_size=rows,
            inputs=tuple(self.tensors("input")),
            outputs=tuple(self.tensors("output")),
            batching=self.batching(),
            policy=self.policy(),
            steps=steps,
        )
        self.leave(top, "")
        return replace(config, left=tuple(self.left))

    def tensors(self, key: str) -> Iterator[TritonTensor]:
        for entry in self.all(self.message, key, dict):
            name = self.one(entry, "name", str)
            if not name:
                raise BadFolder(f'{self.path}: an {key} without a name: expected name: "…"')
            stated = self.all(entry, "dims", int)
            reshape = self.one(entry, "reshape", dict)
            if reshape is not None:
                shape = self.all(reshape, "shape", int)
                self.left.append(f"{key} '{name}': reshape of {stated} to {shape}: {REASONS['reshape']}")
                stated = shape
            type_ = self.one(entry, "data_type", Word)
            label_file = self.one(entry, "label_filename", str)
            self.leave(entry, f"{key} '{name}': ")
            if len(stated) > MAX_RANK:
                raise BadFolder(
                    f"{self.path}: {key} '{name}' has {len(stated)} dims: expected at most {MAX_RANK}"
                )
            dims = None if reshape is None and not stated else tuple(stated)
            datatype = _TYPES.get(type_, type_.removeprefix("TYPE_")) if type_ else None
            yield TritonTensor(name, datatype, dims, label_file or None)

    def batching(self) -> Batching:
        found = self.one(self.message, "dynamic_batching", dict)
        if found is None:
            return Batching()
        delay = self.one(found, "max_queue_delay_microseconds", int) or 0
        queue = self.one(found, "default_queue_policy", dict) or {}
        size = self.one(queue, "max_queue_size", int) or Batching().max_queue_size
        timeout = self.one(queue, "default_timeout_microseconds", int) or 0
        if min(delay, size, timeout) < 0:
            raise BadFolder(f"{self.path}: dynamic_batching: expected no negative number")
        self.leave(queue, "dynamic_batching.default_queue_policy.")
        self.leave(found, "dynamic_batching.")
        return Batching(delay, size, timeout_ms=-(-timeout // 1000))

    def policy(self) -> tuple[Any, ...]:
        found = self.one(self.message, "version_policy", dict) or {}
        latest, specific = self.one(found, "latest", dict), self.one(found, "specific", dict)
        if self.one(found, "all", dict) is not None:
            return ("all",)
        if specific is not None:
            return ("specific", *self.all(specific, "versions", int))
        return ("latest", (latest and self.one(latest, "num_versions", int)) or 1)

    def steps(self, top: Message) -> tuple[str, ...]:
        ensemble = self.one(top, "ensemble_scheduling", dict)
        steps = self.all(ensemble, "step", dict) if ensemble else []
        return tuple(self.one(step, "model_name", str) or "?" for step in steps)

    def all(self, message: Message, key: str, kind: type) -> list[Any]:
        """All values of a field, taken out."""
        values = message.pop(key, [])
        for value in values:
            if not isinstance(value, kind) or (kind is str and isinstance(value, Word)):
                raise BadFolder(f"{self.path}: {key}: {value!r}: expected {_KINDS[kind]}")
            if kind is int and not -(2**63) <= value < 2**63:
                raise BadFolder(f"{self.path}: {key}: {value}: expected a number of 64 bits with a sign")
        return values

    def one(self, message: Message, key: str, kind: type) -> Any:
        """The last value of a field, as protobuf has it, taken out; None where it is not stated."""
        values = self.all(message, key, kind)
        return values[-1] if values else None

    def leave(self, message: Message, where: str) -> None:
        for key in (key for key, values in message.items() if not all(map(_is_default, values))):
            reason = REASONS.get(key)
            self.left.append(f"{where}{key}" + (f": {reason}" if reason else ""))


def _is_default(value: Any) -> bool:
    """True if this value is the field's default, so that stating it changes nothing. An empty message is no default:
    its presence alone has a meaning."""
    if isinstance(value, dict):
        return bool(value) and all(_is_default(each) for values in value.values() for each in values)
    return value in (0, "", "false", "False", "f", "FORMAT_NONE", "REJECT")


_KINDS = {str: "a string", int: "a whole number", dict: "a message", Word: "a name such as TYPE_FP32"}
