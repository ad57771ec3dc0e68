"""A model's inputs and outputs: names, datatypes and shapes, each free dimension with its bounds.

A spec is read from ``model.toml`` once (`folder/package.py`), made exact by the capture (ranges and equalities that
``torch.export`` found) and stored as ``spec.json`` with each version. Requests, samples and outputs are checked against
it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ..errors import BadFolder, BadInput, BadRequest
from ..files.json_fields import JsonFields
from ..files.stored_json import all_typed, typed
from .batch_axis import batch_back
from .datatypes import DATATYPES, Datatype, Wire, name_of
from .value_range import ValueRange, fault_of

DETECTIONS = "detections"
KINDS = ("tensor", "logits", "probabilities", "score", "indices", "embedding", "image", DETECTIONS)
FORMS = ("auto", "torch", "onnx", "live")
_FREE = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?:=(?P<low1>\d+)\.\.(?P<high1>\d*))?|(?P<low2>\d+)\.\.(?P<high2>\d*)"
)
DIM = re.sub(r"\?P<\w+>", "", _FREE.pattern)  # without names of groups, which other languages write otherwise


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: fixed where ``minimum == maximum``; free and unbounded above where ``maximum`` is None.

    Dimensions of equal ``name`` have equal sizes in one request.
    """

    minimum: int = 1
    maximum: int | None = None
    name: str | None = None

    @classmethod
    def parse(cls, text: int | str) -> "Dim":
        """Read ``8``, ``-1``, ``"1..512"``, ``"2.."``, ``"length"`` or ``"length=2..512"``."""
        if isinstance(text, int) and not isinstance(text, bool):
            if text == -1:
                return cls()
            if text >= 0:
                return cls(text, text)
        elif isinstance(text, str) and (match := _FREE.fullmatch(text)):
            low, high = match["low1"] or match["low2"], match["high1"] or match["high2"]
            if low is None:
                return cls(name=match["name"])
            if not high or int(low) <= int(high):
                return cls(int(low), int(high) if high else None, match["name"])
        raise BadFolder(
            f"the dimension {text!r} is not one: expected a size (8), a free dimension (-1), "
            'bounds ("1..512"), a name ("length") or both ("length=2..512")'
        )

    @staticmethod
    def is_name(symbol: str) -> bool:
        """True for a text that `parse` reads as a name: a graph may have symbols that are none."""
        return (match := _FREE.fullmatch(symbol)) is not None and match["name"] == symbol

    @property
    def fixed(self) -> bool:
        return self.minimum == self.maximum

    def admits(self, size: int) -> bool:
        return size >= self.minimum and (self.maximum is None or size <= self.maximum)

    def to_json(self) -> int | str:
        if self.fixed:
            return self.minimum
        if self.maximum is None and self.minimum == 1:
            return self.name or -1
        bounds = f"{self.minimum}..{'' if self.maximum is None else self.maximum}"
        return f"{self.name}={bounds}" if self.name else bounds

    @property
    def wire(self) -> int:
        """The size as the protocol's metadata writes it, or -1 where it is free."""
        return self.minimum if self.fixed else -1


_LONGEST_SHOWN, _MOST_SHOWN = 80, 20  # characters of a name in a message, and names


def names_fault(model: str, wanted: Sequence[str], came: Sequence[str]) -> str:
    """The fault of a request's input names, which are not ``wanted``, as a sentence."""
    missing = [name for name in wanted if name not in came]
    unknown = [name[:_LONGEST_SHOWN] for name in came if name not in wanted]
    if len(wanted) == len(came):
        expected, got = (
            ", ".join(f"'{name}'" for name in names[:_MOST_SHOWN]) for names in (missing, unknown)
        )
        return f"unexpected inference input for model '{model}': expected {expected}, got {got}"
    given = [name[:_LONGEST_SHOWN] for name in came[:_MOST_SHOWN]]
    return (
        f"expected {len(wanted)} inputs but got {len(came)} inputs for model '{model}'. Got input(s) {given}, but "
        f"missing required input(s) {missing}. Please provide all required input(s): {list(wanted)}."
    )


@dataclass(frozen=True, slots=True)
class TensorSpec(JsonFields):
    """One input or output. ``shape[0]`` is the batch unless the model is not batched.

    ``batch_axis``: where the model itself and its callers have the batch; `as_called` has the shape in their order.
    """

    name: str
    datatype: str
    shape: tuple[Dim, ...]
    kind: str = "tensor"
    labels: tuple[str, ...] = ()
    picture: Mapping[str, Any] | None = None
    wire: Wire | None = None  # an input's smaller datatype in requests
    range: ValueRange | None = None  # of an integer input, in the model's datatype; None: any value
    # The values of such an integer input are lengths, from 1 to the size of the axis of this name.
    lengths_of: str = ""
    batch_axis: int = 0

    @property
    def type(self) -> Datatype:
        return DATATYPES[self.datatype]

    @property
    def wire_shape(self) -> list[int]:
        """The shape as requests and answers have it, -1 where a size is free."""
        return [dim.wire for dim in batch_back(self.shape, self.batch_axis)]

    def as_called(self) -> "TensorSpec":
        """The spec with the axes in the model's own order, as in ``model.toml`` and in requests."""
        if self.batch_axis == 0:
            return self
        return replace(self, shape=batch_back(self.shape, self.batch_axis))

    def fault(self, shape: Sequence[int], datatype: str) -> str | None:
        """The fault of a tensor of this shape and datatype, as a sentence; None where it fits."""
        if datatype != self.datatype:
            return f"expected datatype {self.datatype}, got {datatype}"
        if len(shape) != len(self.shape) or not all(
            dim.admits(size) for dim, size in zip(self.shape, shape, strict=True)
        ):
            got = f"got [{','.join(map(str, shape))}]{self.why_not_empty(shape)}"
            return f"expected shape {self.describe_shape()}, {got}"
        return None

    def why_not_empty(self, shape: Sequence[int], batched: bool = True) -> str:
        """The end of a message about ``shape`` where a size is 0 and any seems to fit (-1); empty for other shapes."""
        if len(shape) == len(self.shape):
            for axis, (dim, size) in enumerate(zip(self.shape, shape, strict=True)):
                if not size and not dim.fixed:
                    if batched and axis == self.batch_axis:
                        return "; a batch has at least one row"
                    return f"; axis {axis} has at least {dim.minimum}"
        return ""

    def output_fault(self, shape: Sequence[int], datatype: str) -> str | None:
        """The fault of an output, as `fault`. A free size of it may be 0: a picture may have nothing to be found."""
        empty = (Dim(0, dim.maximum) if dim.minimum == 1 and not dim.fixed else dim for dim in self.shape)
        fits = replace(self, shape=tuple(empty)).fault(shape, datatype) is None
        return None if fits else self.fault(shape, datatype)

    def describe_shape(self) -> str:
        return "[" + ",".join(str(dim.to_json()) for dim in self.shape) + "]"

    def to_json(self) -> dict[str, Any]:
        out = {
            "name": self.name,
            "datatype": self.datatype,
            "shape": [dim.to_json() for dim in self.shape],
            "kind": self.kind,
        }
        more = {
            "labels": list(self.labels) or None,
            "picture": None if self.picture is None else dict(self.picture),
            "wire": self.wire and self.wire.to_json(),
            "range": self.range and self.range.to_json(),
            "lengths_of": self.lengths_of or None,
            "batch_axis": self.batch_axis or None,
        }
        return out | {key: value for key, value in more.items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TensorSpec":
        return cls(
            name=typed(str, data["name"]),
            datatype=typed(str, data["datatype"]),
            shape=tuple(Dim.parse(item) for item in typed(list, data["shape"])),
            kind=typed(str, data.get("kind", "tensor")),
            labels=tuple(typed(str, label) for label in data.get("labels", ())),
            picture=data.get("picture"),
            wire=Wire.from_json(data.get("wire")),
            range=ValueRange.parse(data["range"]) if "range" in data else None,
            lengths_of=typed(str, data.get("lengths_of", "")),
            batch_axis=typed(int, data.get("batch_axis", 0)),
        )


UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True, slots=True)
class ParityLimits(JsonFields):
    """The gate's limits. ``min_sqnr_db`` None means 20·log10(1/u) − 10 for the half's own u.

    ``max_ties``: share of the pairs that are distinct in FP32; ``max_swaps``: of those further apart than the allowed
    error; ``min_top10_overlap``: share of the ten best (`exporters/gate/order.py`). ``unstable``: what becomes of a
    model whose FP32 answers are no reference (`exporters/proof/no_reference.py`): ``fp32`` serves it so, ``accept``
    makes a half. ``min_recall`` is no limit of the gate, but of ``halfeven index-check``; None: its own default.
    ``overridden`` names the limits of the gate that ``model.toml`` set: the report shows them as overrides.
    """

    max_error_u: float = 4.0
    min_sqnr_db: float | None = None
    min_slice_sqnr_db: float = 30.0
    max_flips: float = 0.005
    max_kl_nats: float = 1e-4
    max_ties: float = 0.001
    max_swaps: float = 1e-5
    min_top10_overlap: float = 0.9
    unstable: str = "fp32"
    min_recall: float | None = None
    overridden: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = JsonFields.to_json(self)
        if self.min_recall is None:  # so that a spec says what it said before there was one
            del found["min_recall"]
        return found


@dataclass(frozen=True, slots=True)
class Batching(JsonFields):
    """The rules by which requests are put together: ``max_queue_size`` in requests, the delay in microseconds.

    ``buckets``: the numbers of rows that a batch is filled up to, ascending; the model's ``max_batch_size`` is
    always one more. Empty: never filled up. ``auto``: never on a CPU, to powers of two on a CUDA device.
    ``lengths``: the sizes, ascending, to which an axis with a mask is filled up (`filled_lengths.py`). Empty: never.

    ``max_queue_bytes`` bounds the inputs that wait, ``max_queue_ms`` how long a new request would have to wait as
    measured (0: no such limit), ``max_batch_bytes`` the inputs of one batch (0: rows alone count).
    ``timeout_ms`` is how long a request waits that names no timeout of its own (0: no limit).
    ``max_request_rows``: larger requests are refused, those above a batch are split (0: 16 × ``max_batch_size``).
    """

    max_queue_delay_us: int = 0
    max_queue_size: int = 1024
    buckets: tuple[int, ...] | Literal["auto"] = "auto"
    max_queue_bytes: int = 256 * 2**20
    max_queue_ms: int = 10_000
    max_batch_bytes: int = 0
    timeout_ms: int = 0
    max_request_rows: int = 0
    lengths: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = JsonFields.to_json(self)
        if not self.lengths:  # so that a spec says what it said before there were any
            del found["lengths"]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Batching":
        """The settings from JSON; a missing key (in a file of an older version) has its default."""
        all_typed(cls(), data)
        buckets, lengths = data.get("buckets", "auto"), data.get("lengths", ())
        buckets = buckets if buckets == "auto" else tuple(typed(int, n) for n in buckets)
        lengths = tuple(typed(int, n) for n in lengths)
        return cls(**{**data, "buckets": buckets, "lengths": lengths})


@dataclass(frozen=True, slots=True)
class ModelSpec(JsonFields):
    """A model as its callers see it. ``max_batch_size`` 0: not batched, shapes are exact."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 64
    form: str = "auto"
    parity: ParityLimits = field(default_factory=ParityLimits)
    batching: Batching = field(default_factory=Batching)

    @property
    def batched(self) -> bool:
        return self.max_batch_size > 0

    @property
    def max_request_rows(self) -> int:
        """The rows that one request may have: more than a batch is split into parts and joined again."""
        return max(self.batching.max_request_rows or 16 * self.max_batch_size, self.max_batch_size)

    def with_max_batch_size(self, rows: int) -> "ModelSpec":
        return replace(self, max_batch_size=rows)

    def on_the_wire(self) -> "ModelSpec":
        """The spec as callers see it: each input in the datatype that requests carry."""
        if all(tensor.wire is None for tensor in self.inputs):
            return self
        inputs = (t if t.wire is None else replace(t, datatype=t.wire.datatype) for t in self.inputs)
        return replace(self, inputs=tuple(inputs))

    def as_called(self) -> "ModelSpec":
        """The spec with every tensor's axes in the model's own order, the batch on ``batch_axis`` of each."""
        if not self.batch_axes:
            return self
        inputs, outputs = (tuple(t.as_called() for t in some) for some in (self.inputs, self.outputs))
        return replace(self, inputs=inputs, outputs=outputs)

    @property
    def batch_axes(self) -> dict[str, dict[str, int]]:
        """Name → axis under ``inputs`` and ``outputs``, where the batch is not the first axis; empty if none."""
        sides = {"inputs": self.inputs, "outputs": self.outputs}
        axes = {key: {t.name: t.batch_axis for t in side if t.batch_axis} for key, side in sides.items()}
        return axes if any(axes.values()) else {}

    def signature(self) -> tuple[Any, ...]:
        """The part that callers rely on and a new version must keep, the meaning of numbers on the wire included."""
        plain = tuple((t.name, t.datatype, tuple(t.wire_shape)) for t in (*self.inputs, *self.outputs))
        wires = {t.name: t.wire for t in self.inputs if t.wire is not None}
        return (self.batched, plain, *(more for more in (wires, self.batch_axes) if more))

    def check_inputs(self, arrays: Mapping[str, np.ndarray], error: type[BadInput] = BadRequest) -> int:
        """Check named arrays against the inputs; gives the number of rows (1 where not batched).

        Raises ``error`` naming the tensor, what was expected and what came, values out of their range included.
        """
        wanted = [spec.name for spec in self.inputs]
        if sorted(arrays) != sorted(wanted):
            raise error(names_fault(self.name, wanted, list(arrays)))
        sizes: dict[str, tuple[int, str]] = {}
        for spec in self.inputs:
            array = arrays[spec.name]
            if fault := spec.fault(array.shape, name_of(array.dtype)):
                raise error(f"input '{spec.name}' of model '{self.name}': {fault}")
            for axis, (dim, size) in enumerate(zip(spec.shape, array.shape, strict=True)):
                key = "(batch)" if self.batched and axis == 0 else dim.name
                if key is None:
                    continue
                known, where = sizes.setdefault(key, (size, spec.name))
                if known != size:
                    raise error(
                        f"input '{spec.name}' of model '{self.name}': axis {axis} ({key.strip('()')}) is {size}, "
                        f"but input '{where}' has {known} there; they must be equal"
                    )
        self.check_values([arrays[spec.name] for spec in self.inputs], error)
        return sizes["(batch)"][0] if self.batched else 1

    def check_values(self, arrays: Sequence[np.ndarray], error: type[BadInput] = BadRequest) -> None:
        """Check integers and BOOL, in the spec's order and shapes, by range. Raises ``error`` naming the input."""
        for spec, array, valid in zip(self.inputs, arrays, self.ranges(arrays), strict=True):
            if fault := fault_of(array, valid):
                of = f", for they are lengths of '{spec.lengths_of}'" if spec.lengths_of else ""
                raise error(f"input '{spec.name}' of model '{self.name}': {fault}{of}")

    def ranges(self, arrays: Sequence[np.ndarray], first: int = 0) -> list[ValueRange | None]:
        """The range of each input's values beside these arrays, which stand in the spec's order: lengths end where the
        axis ends that they are of. ``first``: how many axes the arrays have before those of the spec."""
        if not any(spec.lengths_of for spec in self.inputs):
            return [spec.range for spec in self.inputs]
        sizes = {
            dim.name: size
            for spec, array in zip(self.inputs, arrays, strict=True)
            for dim, size in zip(spec.shape, array.shape[first:], strict=True)
        }
        return [
            ValueRange((1,), (max(sizes[spec.lengths_of], 1),)) if spec.lengths_of else spec.range
            for spec in self.inputs
        ]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelSpec":
        parity = all_typed(ParityLimits(), data["parity"])
        parity["overridden"] = tuple(parity["overridden"])
        return cls(
            name=typed(str, data["name"]),
            inputs=tuple(TensorSpec.from_json(item) for item in data["inputs"]),
            outputs=tuple(TensorSpec.from_json(item) for item in data["outputs"]),
            max_batch_size=typed(int, data["max_batch_size"]),
            form=typed(str, data["form"]),
            parity=ParityLimits(**parity),
            batching=Batching.from_json(data["batching"]),
        )
