"""The functions of other FP16 converters, by their names and parameters: what they give is proven equal.

    from halfeven.drop_in import convert_float_to_float16        # onnxconverter_common.float16, onnxruntime's float16
    from halfeven.drop_in import auto_convert_mixed_precision    # onnxconverter_common.auto_mixed_precision
    from halfeven.drop_in import convert_to_mixed_precision      # modelopt.onnx.autocast

A model whose half is not proven equal raises ParityRefused, where the other converters give a model all the same. One
of which nothing is half is given back in FP32 with a warning, if its inputs and outputs are to keep their datatypes.
Parameters that choose nodes by magnitude have no meaning here: one that is not at its default is named in a warning.
"""

import glob
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, ValueInfoProto, external_data_helper
from onnx.checker import ValidationError
from onnx.version_converter import convert_version

from ...exporters.guessing.onnx_file import samples_of_feed, samples_of_files
from ...exporters.half_files.half_file import FP32
from ...exporters.onnx.conversion import CONSTANTS_ALONE
from ...exporters.onnx.reading.bounded_file import external_files, read_graph, tensors
from ...exporters.onnx.reading.graph import FLOAT, HALVES, opset_of, walk
from ...exporters.onnx.reading.large_files import is_large, save
from ...exporters.onnx.reading.widening import cast_at_the_boundary
from ...exporters.onnx.runtime import has_half, runtime_answers
from ...exporters.report.headline import not_run
from ...models.errors import BadFolder, BadInput, BadSamples, BadSetting, Conflict, ParityRefused
from ...models.files.durable import drafted
from .arrays_given import as_numpy
from .half_files import fp16

_Samples: TypeAlias = Mapping[str, np.ndarray] | str | os.PathLike[str] | None
_Kept: TypeAlias = bool | Collection[str]
_Accepts: TypeAlias = Callable[[list[np.ndarray], list[np.ndarray]], bool]


def convert_float_to_float16(
    model: ModelProto | str | os.PathLike[str],
    min_positive_val: float = 1e-7,
    max_finite_val: float = 1e4,
    keep_io_types: _Kept = False,
    disable_shape_infer: bool = False,
    op_block_list: Sequence[str] | None = None,
    node_block_list: Sequence[str] | None = None,
    check_fp16_ready: bool = True,
    **others: Any,
) -> ModelProto:
    """The function as ``onnxconverter_common.float16`` and ``onnxruntime.transformers.float16`` have it. Weights keep
    their values: none is moved to ``min_positive_val`` or ``max_finite_val``. ``keep_io_types``: True, or the names of
    the inputs and outputs that stay FP32. Raises ParityRefused, BadInput for a model that has half values already (but
    with ``check_fp16_ready=False``)."""
    _ignored(
        min_positive_val=min_positive_val not in (1e-7, 5.96e-8),
        max_finite_val=max_finite_val not in (1e4, 65504.0),
        **{name: bool(value) for name, value in others.items()},
    )
    model = _read(model)
    if check_fp16_ready and has_half(model):
        raise BadInput(
            "the model has half values already: expected one in FP32; give check_fp16_ready=False to convert it again"
        )
    keep = _patterns(model, op_block_list, node_block_list, str.__eq__)
    return _converted(model, None, keep, "fp16", keep_io_types)


def convert_float_to_float16_model_path(
    model_path: str | os.PathLike[str],
    min_positive_val: float = 1e-7,
    max_finite_val: float = 1e4,
    keep_io_types: _Kept = False,
    **others: Any,
) -> ModelProto:
    """`convert_float_to_float16` of a file. Raises as that."""
    return convert_float_to_float16(model_path, min_positive_val, max_finite_val, keep_io_types, **others)


def auto_convert_mixed_precision(
    model: ModelProto | str | os.PathLike[str],
    feed_dict: Mapping[str, np.ndarray],
    validate_fn: _Accepts | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool = False,
) -> ModelProto:
    """The function as ``onnxconverter_common.auto_mixed_precision`` has it. ``feed_dict`` judges: each row of it is a
    sample; all of it is one where the model fixes the batch. A half that passes the gate has to pass ``validate_fn``,
    or ``rtol`` and ``atol``, as well. Raises ParityRefused."""
    half = _converted(_read(model), feed_dict, (), "fp16", keep_io_types)
    if not _accepted(model, half, feed_dict, validate_fn, rtol, atol):
        raise ParityRefused(
            "the half passes the gate, but validate_fn, rtol or atol refuse its answers to feed_dict: expected that "
            "they accept what is equal to within FP16's rounding"
        )
    return half


def auto_convert_mixed_precision_model_path(
    source_model_path: str | os.PathLike[str],
    input_feed: Mapping[str, np.ndarray],
    target_model_path: str | os.PathLike[str],
    provider: Sequence[str] | None = None,
    location: str | None = None,
    customized_validate_func: _Accepts | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool = True,
    verbose: bool = False,
) -> None:
    """`auto_convert_mixed_precision` from file to file; with ``location``, or from 2 GiB on, the weights stand in a
    file of their own. The proof is made on a CPU. Raises ParityRefused, BadInput where the target has no folder, is the
    model or is ``location``, Conflict where ``location`` is another file."""
    _ignored(provider=list(provider or ()) not in ([], ["CPUExecutionProvider"]))
    source, target = Path(source_model_path), Path(target_model_path)
    place, sources = location or "fp16_tensor.data", (source, *_weights(source).values())
    if not target.parent.is_dir():
        raise BadInput(f"{target}: there is no folder {target.parent}; make it first")
    if target.exists() and any(map(target.samefile, sources)):
        raise BadInput(
            f"{target} is the model itself or its weights, which are never overwritten: give another target"
        )
    if Path(place).name != place:
        raise BadInput(
            f"location={place!r}: expected the name of a file beside {target.name}, without a folder"
        )
    if location is not None:
        _check_place(target, place, sources)
    half = auto_convert_mixed_precision(
        _read(source), input_feed, customized_validate_func, rtol, atol, keep_io_types
    )
    apart = location is not None or is_large(half)
    if apart:
        _check_place(target, place, sources)
    with drafted(target) as draft:
        onnx.save(half, draft, save_as_external_data=apart, location=place)
        if apart and not draft.with_name(place).exists():  # no weight is large enough
            target.with_name(place).unlink(missing_ok=True)


def convert_to_mixed_precision(
    onnx_path: str | os.PathLike[str],
    low_precision_type: str = "fp16",
    nodes_to_exclude: Sequence[str] | None = None,
    op_types_to_exclude: Sequence[str] | None = None,
    nodes_to_include: Sequence[str] | None = None,
    op_types_to_include: Sequence[str] | None = None,
    data_max: float | None = 512,
    init_max: float | None = 65504.0,
    keep_io_types: bool = False,
    calibration_data: _Samples = None,
    custom_rule: object = None,
    init_conversion_max_bytes: int | None = None,
    providers: Sequence[str] = ("cpu",),
    trt_plugins: Sequence[str] = (),
    trt_plugins_precision: Sequence[str] = (),
    max_depth_of_reduction: int | None = None,
    opset: int | None = None,
    **others: Any,
) -> ModelProto:
    """The function as ``modelopt.onnx.autocast`` has it; ``calibration_data`` (inputs by name, an npz file or a folder
    of them) are the samples that judge. Bounds by magnitude, forced nodes and plug-ins have no meaning here. Raises
    ParityRefused."""
    _ignored(
        nodes_to_include=bool(nodes_to_include),
        op_types_to_include=bool(op_types_to_include),
        data_max=data_max not in (None, 512),
        init_max=init_max not in (None, 65504.0),
        custom_rule=custom_rule is not None,
        init_conversion_max_bytes=init_conversion_max_bytes is not None,
        providers=list(providers) != ["cpu"],
        trt_plugins=bool(trt_plugins),
        trt_plugins_precision=bool(trt_plugins_precision),
        max_depth_of_reduction=max_depth_of_reduction is not None,
        **{name: bool(value) for name, value in others.items()},
    )
    model = _at_opset(_read(onnx_path), opset)
    keep = _patterns(model, op_types_to_exclude, nodes_to_exclude, _matches)
    return _converted(model, calibration_data, keep, low_precision_type, keep_io_types)


def convert_to_f16(
    model: ModelProto,
    low_precision_type: str = "fp16",
    keep_io_types: bool = True,
    op_block_list: Sequence[str] = (),
    tensor_block_dict: Mapping[str, Any] | None = None,
    trt_plugins: Sequence[str] | None = None,
    use_standalone_type_inference: bool = False,
    opset: int | None = None,
) -> ModelProto:
    """The function as ``modelopt.onnx.autocast`` has it. Raises ParityRefused."""
    _ignored(tensor_block_dict=bool(tensor_block_dict), trt_plugins=bool(trt_plugins))
    model = _at_opset(_read(model), opset)
    keep = _patterns(model, op_block_list, None, str.__eq__)
    return _converted(model, None, keep, low_precision_type, keep_io_types)


def _check_place(target: Path, place: str, sources: Sequence[Path]) -> None:
    """Raises BadInput where ``place`` is the target itself, Conflict where it is a file, but not the target's own."""
    there = target.with_name(place)
    if place == target.name:
        raise BadInput(
            f"location={place!r} is the name of the target itself: expected another one, for its weights alone"
        )
    # The target may be a copy of the source, which names the same file of weights.
    if there.exists() and (place not in _weights(target) or any(map(there.samefile, sources))):
        raise Conflict(f"{there} is not the file of weights of {target.name} alone: give another location")


def _weights(file: Path) -> Mapping[str, Path]:
    try:
        return external_files(file, read_graph(file))
    except BadFolder:  # there is no such file yet
        return {}


def _read(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """A model, or that of a file; the caller's own is never changed."""
    if isinstance(model, ModelProto):
        copied = ModelProto()
        copied.CopyFrom(model)
        if apart := [one.name for one in tensors(copied) if external_data_helper.uses_external_data(one)]:
            raise BadInput(
                f"the model's weights are in another file, the first is '{apart[0]}': expected them in the model; "
                "onnx.load(path) reads them too, or give the path"
            )
        return copied
    if not isinstance(model, str | os.PathLike):
        raise BadInput(f"expected an ONNX ModelProto or the path of a file, got a {type(model).__name__}")
    try:
        return onnx.load(model)
    except (DecodeError, ValidationError) as error:  # the second: of weights that are not beside it
        raise BadInput(f"{os.fspath(model)} cannot be read as an ONNX file: {error}") from error


def _at_opset(model: ModelProto, opset: int | None) -> ModelProto:
    """The model at a later opset; it is not taken back to an earlier one. Raises BadInput for one that onnx lacks."""
    own, newest = opset_of(model), onnx.defs.onnx_opset_version()
    if opset is not None and not isinstance(opset, int):
        raise BadInput(f"opset={opset!r}: expected a number")
    if opset is not None and opset > newest:
        raise BadInput(f"opset={opset}: expected one up to {newest}, the newest of onnx {onnx.__version__}")
    if opset is not None and opset < own:
        warnings.warn(
            f"halfeven.drop_in ignores opset={opset}: it is lower than the original model's opset {own}, which stays",
            stacklevel=3,
        )
    return convert_version(model, opset) if opset is not None and opset > own else model


def _patterns(
    model: ModelProto,
    ops: Sequence[str] | None,
    nodes: Sequence[str] | None,
    means: Callable[[str, str], bool],
) -> tuple[str, ...]:
    """The nodes of the model that the lists, or a single name, name. ``means``: if one of ``nodes`` means a name."""
    ops, nodes = ([one] if isinstance(one, str) else one for one in (ops, nodes))
    found = [node for graph in (model.graph, *model.functions) for node in walk(graph)]
    names = dict.fromkeys(node.name for node in found if any(means(one, node.name) for one in nodes or ()))
    types = {node.op_type for node in found}
    return (*map(glob.escape, filter(None, names)), *(f"op:{op}" for op in ops or () if op in types))


def _matches(pattern: str, name: str) -> bool:
    try:
        return bool(re.match(pattern, name))
    except re.error as error:
        raise BadSetting(f"nodes_to_exclude: {pattern!r} is no regular expression: {error}") from error


def _ignored(**given: bool) -> None:
    if named := [name for name, differs in given.items() if differs]:
        warnings.warn(f"halfeven.drop_in ignores {', '.join(named)}", stacklevel=3)


def _converted(
    model: ModelProto, samples: _Samples, keep: Sequence[str], dtype: str, kept_ends: _Kept
) -> ModelProto:
    judging, ends = _arrays(model.graph, samples), _float_ends(model, kept_ends)
    if ends and dtype == "bf16":
        ends = []
        warnings.warn(
            "halfeven.drop_in ignores keep_io_types=False for bf16: ONNX Runtime takes no arrays of it from Python",
            stacklevel=3,
        )
    for value in ends if dtype in HALVES else ():
        value.type.tensor_type.elem_type = HALVES[dtype]
    if ends:
        cast_at_the_boundary(model)
        judging = judging and _fed(model, judging)
    with TemporaryDirectory(prefix="halfeven-drop-in-") as place:
        # A file named "model" gets the name of its folder, which is by chance.
        source, target = Path(place) / "original.onnx", Path(place) / "half.onnx"
        save(model, source)
        made = fp16(source, target, judging, keep=keep, dtype=dtype)
        if made.verdict == FP32:  # no products: all else may be half, as those converters have it
            wider = fp16(source, target, judging, keep=keep, dtype=dtype, level="O3", search=True)
            made = wider if wider.file else made
        if made.file is not None:
            if said := not_run(made.facts):
                warnings.warn(f"halfeven.drop_in{said}", stacklevel=3)
            return _with_the_sizes_of(model, onnx.load(made.file))
        if made.verdict == FP32 and not ends:
            warnings.warn(f"halfeven.drop_in gives the model back in FP32: {made.reason}", stacklevel=3)
            return model
        raise ParityRefused(f"no half of the model is proven equal: {made.reason}")


def _with_the_sizes_of(model: ModelProto, half: ModelProto) -> ModelProto:
    """The half with the batch that the model fixes, which was free. Warns of inputs and outputs that it lacks."""
    weights = {one.name for one in model.graph.initializer} if model.ir_version < CONSTANTS_ALONE else ()
    ends = [[*one.graph.input, *one.graph.output] for one in (model, half)]
    given, left = (Counter(value.name for value in each if value.name not in weights) for each in ends)
    if missing := given - left:
        why = "the half has each output that is a tensor, once, and no input that has a value in the model"
        warnings.warn(f"halfeven.drop_in leaves out {', '.join(missing)}: {why}", stacklevel=4)
    fixed = {one.name: one.type.tensor_type.shape.dim for one in ends[0]}
    for value in ends[1]:
        for own, dim in zip(fixed[value.name], value.type.tensor_type.shape.dim, strict=False):
            if own.HasField("dim_value") and not dim.HasField("dim_value"):
                dim.CopyFrom(own)
    return half


def _float_ends(model: ModelProto, kept: _Kept) -> list[ValueInfoProto]:
    """The inputs and outputs that are to become half. An initialiser that is listed as an input is none."""
    if kept is True:
        return []
    values = (*model.graph.input, *model.graph.output)
    asked = {kept} if isinstance(kept, str) else set(kept or ())
    if unknown := sorted(asked - {one.name for one in values}):
        warnings.warn(
            f"halfeven.drop_in ignores {unknown[0]!r} of keep_io_types: the model has no such input or output",
            stacklevel=4,
        )
    stay = {tensor.name for tensor in model.graph.initializer} | asked
    return [one for one in values if one.type.tensor_type.elem_type == FLOAT and one.name not in stay]


def _arrays(graph: GraphProto, given: _Samples) -> dict[str, np.ndarray] | None:
    """Samples by name. Raises BadSamples."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return samples_of_feed(graph, {name: as_numpy(one, name) for name, one in given.items()})
    return samples_of_files(graph, Path(given))


def _fed(model: ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs in the datatype of floats that the model takes. Raises BadSamples for numbers beyond the range of half."""
    taken = {one.name: one.type.tensor_type.elem_type for one in model.graph.input}
    floats = {FLOAT: np.float32, HALVES["fp16"]: np.float16}
    fed = dict(inputs)
    for name in [one for one in inputs if taken.get(one) in floats]:
        with np.errstate(over="ignore"):
            fed[name] = np.asarray(inputs[name]).astype(floats[taken[name]])
        if np.isinf(fed[name]).sum() > np.isinf(np.asarray(inputs[name])).sum():
            raise BadSamples(
                f"input '{name}' has numbers beyond 65504, which FP16 does not hold: give others, or keep_io_types=True"
            )
    return fed


def _accepted(
    model: ModelProto | str | os.PathLike[str],
    half: ModelProto,
    inputs: Mapping[str, np.ndarray],
    validate: _Accepts | None,
    rtol: float | None,
    atol: float | None,
) -> bool:
    if validate is None and rtol is None and atol is None:
        return True  # the model need not run with all rows at once
    # A half has no sequences; `_with_the_sizes_of` has named them. A model that is given back in FP32 has them.
    kinds = {value.name: value.type.WhichOneof("value") for value in half.graph.output}
    names = [name for name, kind in kinds.items() if kind in (None, "tensor_type")]
    sides = (runtime_answers(one, names)(_fed(one, inputs)) for one in (_read(model), half))
    of_original, of_half = (list(answers.values()) for answers in sides)
    if validate is not None and not validate(of_original, of_half):
        return False
    if rtol is None and atol is None:
        return True
    relative, absolute = 1e-5 if rtol is None else rtol, 1e-8 if atol is None else atol
    return all(
        np.allclose(one, other, relative, absolute) for one, other in zip(of_original, of_half, strict=True)
    )
