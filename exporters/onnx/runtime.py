"""ONNX Runtime's CPU on a whole model in memory: whether it loads, its answers, whether they depend on the batch.

It keeps chains of half nodes in FP32, so it never judges half storage; `precision/oracle.py` does.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ...models.capture.agreement import axis_of_rows, paired_rows
from ...models.engines.onnx_engine import DEADLY_IN_HALF
from ...models.errors import BadFolder, CannotConvert, NotRun
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from ..proof.threads import threads_now
from ..question import SAME_AMONG_OTHERS, Answers, Arrays, largest_of, same_among_others
from .reading.bounded_file import bytes_of, tensors
from .reading.graph import HALVES, attribute, element_type, element_type_of, walk
from .reading.large_files import check, is_large, save, weights_as_inputs
from .reading.one_node import key_of, session

_SMALL_MODEL, _SMALL_CONSTANT = 1 << 20, 1 << 12  # bytes


def finished(
    model: ModelProto, what: str, error: type[BadFolder] | type[CannotConvert] = BadFolder
) -> tuple[ValueInfoProto, ...]:
    """Strict shape inference, the full check and a load by ONNX Runtime; gives the value_info, written in, too.

    Raises ``error`` with the reason.
    """
    try:
        found = tuple(inferred(model))
        model.graph.value_info.extend(found)
        check(model, full=True)
        session_of(model)
    except Exception as reason:
        raise error(f"{what} is no model that can be run: {str(reason)[:600]}") from reason
    return found


def inferred(model: ModelProto) -> list[ValueInfoProto]:
    """The types of the inner values, by strict shape inference; large constants are given to it as inputs.

    ONNX has no rule for some operations (GroupNormalization). Where inference ends there, ONNX Runtime gives the types.
    """
    small = sum(map(bytes_of, model.graph.initializer)) < _SMALL_MODEL
    bare = weights_as_inputs(model, _SMALL_MODEL if small else _SMALL_CONSTANT)
    given = (*bare.graph.input, *bare.graph.output, *bare.graph.initializer, *bare.graph.value_info)
    known = {value.name for value in given}
    try:
        found = _inferred(bare)
    except onnx.shape_inference.InferenceError:
        bare.graph.value_info.extend(_types_by_runtime(model, known))
        found = _inferred(bare)
    return [value for value in found.graph.value_info if value.name not in known]


def _inferred(model: ModelProto) -> ModelProto:
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def _types_by_runtime(model: ModelProto, known: Collection[str]) -> list[ValueInfoProto]:
    """The element types and ranks of what the main graph's nodes give, as ONNX Runtime has them when it loads them."""
    wanted = [name for node in model.graph.node for name in node.output if name and name not in known]
    asked = ModelProto()
    asked.CopyFrom(model)
    asked.graph.output.extend(ValueInfoProto(name=name) for name in wanted)
    values = {value.name: value for value in session_of(asked).get_outputs()}
    return [
        # ONNX Runtime gives no sizes for a scalar, and none where it does not know how many axes there are.
        helper.make_tensor_value_info(name, found, values[name].shape or None)
        for name in wanted
        if (found := element_type_of(values[name].type))
    ]


def runtime_answers(model: ModelProto, names: Sequence[str] = ()) -> Answers:
    """A model as ONNX Runtime's CPU runs it, in memory; it raises NotRun. ``names``: the outputs that are asked for, in
    this order; all where none is named."""
    loaded = session_of(model)
    names = names or [value.name for value in loaded.get_outputs()]

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        feed = {name: np.asarray(array) for name, array in arrays.items()}
        try:
            came = loaded.run(names, feed)
        except Exception as error:  # ONNX Runtime has no narrower one
            raise NotRun(
                f"ONNX Runtime does not run the file with these inputs: {str(error)[:400]}; give samples that it takes "
                "(samples.safetensors in the model's folder, or --samples FILE)"
            ) from error
        return dict(zip(names, map(np.asarray, came), strict=True))

    return answer


def session_of(model: ModelProto) -> onnxruntime.InferenceSession:
    """A session of ONNX Runtime's CPU provider for a model in memory; a large model is written to a temporary file."""
    if not is_large(model):
        return loaded(model.SerializeToString())
    with TemporaryDirectory(prefix="halfeven-onnx-") as folder:
        path = Path(folder) / "model.onnx"
        save(model, path)
        return loaded(str(path))


def loaded(source: str | bytes | Path) -> onnxruntime.InferenceSession:
    """A session on a CPU. Raises ONNX Runtime's own error."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads_now()
    return onnxruntime.InferenceSession(
        source,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=DEADLY_IN_HALF,
    )


def answers_alone_differ(
    spec: ModelSpec,
    planning: Samples,
    original: Answers,
    sizes: Sequence[int] = (3,),
    alone: Answers | None = None,
) -> str | None:
    """The reason why rows must not be batched (a row's answer depends on others, or the graph takes one row), or None.

    Batches of ``sizes`` are compared, as far as ``max_batch_size`` admits them, with what ``alone`` (the original
    itself) answers to each of their rows.
    """
    if planning.count < 2:
        return None
    for size in sorted({min(size, spec.max_batch_size) for size in sizes}):
        _, together = next(planning.batches(size))
        try:
            joint = original(together)
        except Exception as error:
            return f"the graph does not run with more than one row ({str(error)[:200]})"
        for row in range(size):
            try:
                one = (alone or original)({name: array[row : row + 1] for name, array in together.items()})
            except Exception as error:
                return f"the graph does not run with row {row} alone ({str(error)[:200]})"
            for tensor in spec.outputs:
                if fault := _fault(one[tensor.name], joint[tensor.name], row, size):
                    return f"output '{tensor.name}' {fault}"
    return None


def refuse_paired_rows(spec: ModelSpec, planning: Samples, original: Answers) -> None:
    """Raises BadFolder for an output that grows with the batch along a second axis too (`axis_of_rows`)."""
    rows = min(3, spec.max_batch_size, planning.count)
    if rows < 2:
        return
    _, together = next(planning.batches(rows))
    try:
        joint = original(together)
        alone = [
            original({name: array[row : row + 1] for name, array in together.items()}) for row in range(rows)
        ]
    except NotRun:
        return  # `answers_alone_differ` says so
    for name in (tensor.name for tensor in spec.outputs):
        shapes = [one[name].shape for one in alone]
        if (axis := axis_of_rows(shapes, joint[name].shape)) is not None:
            raise BadFolder(f"model '{spec.name}': {paired_rows(name, shapes[0], joint[name].shape, axis)}")


def _fault(alone: np.ndarray, joint: np.ndarray, row: int, rows: int) -> str | None:
    """The fault of one row of a batch's output, compared with the answer to that row alone; None for a right row."""
    if len(joint) != rows:
        return f"gives {len(joint)} rows for {rows}"
    if alone.shape[1:] != joint.shape[1:]:
        return "has another shape for more than one row"
    share = SAME_AMONG_OTHERS
    if joint.dtype.kind in "fV":  # V: bfloat16. Of an output in half, one step is more than that share
        share = max(share, float(ml_dtypes.finfo(joint.dtype).eps))
        alone, joint = alone.astype(np.float64), joint.astype(np.float64)
    same = same_among_others(alone[0], joint[row], largest_of(joint), share)
    return None if same else "depends on the other rows of its batch"


_HALF = frozenset(HALVES.values())


def has_half(model: ModelProto) -> bool:
    """True if a value of the model is half."""
    values = (*model.graph.input, *model.graph.output)
    casts = (attribute(node, "to") for node in walk(model.graph) if node.op_type == "Cast")
    types = {value.type.tensor_type.elem_type for value in values} | {t.data_type for t in tensors(model)}
    return not _HALF.isdisjoint(types | set(casts))


@dataclass(slots=True)
class WatchedRun:
    """Runs ``model``, an FP32 file with its constants, and gives the values called ``asked``, whatever makes them."""

    model: ModelProto
    asked: Sequence[str]
    _session: onnxruntime.InferenceSession | None = None

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        if self._session is None:
            self._session = self._loaded()
        held = (tensor for tensor in self.model.graph.initializer if tensor.name in self.asked)
        found = {tensor.name: numpy_helper.to_array(tensor) for tensor in held}
        names = [value.name for value in self._session.get_outputs()]
        feed = {value.name: np.asarray(inputs[value.name]) for value in self._session.get_inputs()}
        return found | feed | dict(zip(names, map(np.asarray, self._session.run(names, feed)), strict=True))

    def _loaded(self) -> onnxruntime.InferenceSession:
        graph, watched = self.model.graph, ModelProto()
        watched.CopyFrom(self.model)
        known = {value.name for value in (*graph.output, *graph.input, *graph.initializer)}
        inner = (name for name in dict.fromkeys(self.asked) if name not in known)
        watched.graph.output.extend(ValueInfoProto(name=name) for name in inner)
        return session_of(watched)

    def moved(self, node: NodeProto, part: np.ndarray, found: Arrays, slot: int = 0) -> np.ndarray:
        """Numbers that belong to the elements of a shape operation's input, in the places of its output ``slot``."""
        arrays = [part, *(found.get(name) for name in node.input[1:])]
        types = [TensorProto.UNDEFINED if each is None else element_type(each) for each in arrays]
        key = key_of(node, types, self.model.opset_import, self.model.ir_version)
        feed = {f"i{place}": each for place, each in enumerate(arrays) if each is not None}
        return np.asarray(session(key).run([f"o{slot}"], feed)[0])
