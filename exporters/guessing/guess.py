"""The guessed description of a model that has no model.toml, and the text of a model.toml for the model."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...models.folder.model_name import NAME
from ...models.spec.spec import Batching, ModelSpec, TensorSpec

CONFIRM = "confirm"  # the word that begins the comment beside every guess
GUESSED = "guessed: "  # how every sentence about a guess begins
_NAMELESS = ("model", "program", "module", "model_quantized")  # file names that say nothing of the model


@dataclass(frozen=True, slots=True)
class Guess:
    """``spec``, ``source`` and ``weights`` (a file name) as model.toml gives them.

    ``samples``: the real inputs that were given, as samples.safetensors has them.
    ``doubts``: what was guessed and why, by (tensor, key), or by ("", key) for a key at the top. ``notes``: what was
    left out of the file's signature.
    """

    spec: ModelSpec
    source: str
    doubts: Mapping[tuple[str, str], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    weights: str | None = None
    samples: Mapping[str, np.ndarray] | None = None

    @property
    def sentences(self) -> tuple[str, ...]:
        """Every guess in one sentence, for a terminal and for the version's notes."""
        return tuple(GUESSED + sentence for sentence in (*self.signature, *self.reasons, *self.notes))

    @property
    def signature(self) -> tuple[str, ...]:
        """Every input and output in one line."""
        return tuple(_line_of(kind, tensor) for kind, tensor in self._tensors())

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line for each doubt: what was guessed, and why."""
        return tuple(f"{' '.join(filter(None, place))}: {why}" for place, why in self.doubts.items())

    def toml(self) -> str:
        """The text of model.toml: each guess has a comment that begins with ``confirm``."""
        return "\n".join([*self._head(), *self._tables(), *self._batching()]) + "\n"

    def _tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        yield from (("input", tensor) for tensor in self.spec.inputs)
        yield from (("output", tensor) for tensor in self.spec.outputs)

    def _head(self) -> Iterator[str]:
        about = f"Written by halfeven for {self.source}. Lines with '{CONFIRM}' are guesses: change what is wrong."
        yield from map(_comment, (about, *self.notes))
        yield f"name = {json.dumps(self.spec.name)}"
        yield f"source = {_quoted(self.source)}"
        if self.weights is not None:
            yield f"weights = {_quoted(self.weights)}"
        yield self._entry("", "max_batch_size", str(self.spec.max_batch_size))

    def _tables(self) -> Iterator[str]:
        for kind, tensor in self._tensors():
            yield f"\n[[{kind}s]]"
            yield f"name = {_quoted(tensor.name)}"
            yield f"datatype = {json.dumps(tensor.datatype)}"
            shape = json.dumps([dim.to_json() for dim in tensor.as_called().shape])
            yield self._entry(tensor.name, "shape", shape)
            if tensor.batch_axis:
                yield self._entry(tensor.name, "batch_axis", str(tensor.batch_axis))
            if tensor.range is not None:
                yield self._entry(tensor.name, "range", json.dumps(tensor.range.to_json()))
            if tensor.lengths_of:
                yield self._entry(tensor.name, "lengths_of", _quoted(tensor.lengths_of))
            if tensor.kind != "tensor" or (tensor.name, "kind") in self.doubts:
                yield self._entry(tensor.name, "kind", json.dumps(tensor.kind))
            if tensor.labels:
                yield f"labels = [{', '.join(map(_quoted, tensor.labels))}]"

    def _batching(self) -> Iterator[str]:
        plain, asked = Batching().to_json(), self.spec.batching.to_json()
        if changed := {key: value for key, value in asked.items() if value != plain[key]}:
            yield "\n[batching]"
            yield from (f"{key} = {json.dumps(value)}" for key, value in changed.items())

    def _entry(self, tensor: str, key: str, value: str) -> str:
        why = self.doubts.get((tensor, key))
        return f"{key} = {value}" + ("  " + _comment(f"{CONFIRM}: {why}") if why else "")


def _quoted(text: str) -> str:
    """A text as a TOML string. JSON's notation is valid TOML, except for an unescaped DEL character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    """One line of TOML, whatever names a file gives its tensors: a line break in one would begin a key."""
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text)


def name_for(path: Path) -> str:
    """A model name from a file's name; from its folder's where the file's says nothing (model.onnx)."""
    stem = path.parent.name if path.stem in _NAMELESS and path.parent.name else path.stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip("._-")[:128]
    return name if NAME.fullmatch(name) else "model"


def _line_of(kind: str, tensor: TensorSpec) -> str:
    of_kind = "" if tensor.kind == "tensor" else f", {tensor.kind}"
    axis = f", batch on axis {tensor.batch_axis}" if tensor.batch_axis else ""
    return f"{kind} '{tensor.name}' {tensor.datatype} {tensor.as_called().describe_shape()}{axis}{of_kind}"
