"""The functions of other FP16 converters, by their names and parameters: what they give is proven equal.

    from halfeven.drop_in import convert_float_to_float16        # onnxconverter_common.float16, onnxruntime's float16
    from halfeven.drop_in import auto_convert_mixed_precision    # onnxconverter_common.auto_mixed_precision
    from halfeven.drop_in import convert_to_mixed_precision      # modelopt.onnx.autocast

A model whose half is not proven equal raises ParityRefused, where the other converters give a model all the same.
Parameters that steer how nodes are chosen by magnitude have no meaning here: one that is not at its default is named in
a warning and ignored.
"""

import glob
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from ...exporters.onnx.reading.graph import walk
from ...exporters.onnx.reading.large_files import save
from ...models.errors import ParityRefused
from .half_files import fp16

_BOUNDARY = "inputs and outputs keep the datatypes of the model"


def convert_float_to_float16(
    model: ModelProto,
    min_positive_val: float = 1e-7,
    max_finite_val: float = 1e4,
    keep_io_types: bool | Sequence[str] = False,
    disable_shape_infer: bool = False,
    op_block_list: Sequence[str] | None = None,
    node_block_list: Sequence[str] | None = None,
    check_fp16_ready: bool = True,
    **others: Any,
) -> ModelProto:
    """As ``onnxconverter_common.float16`` and ``onnxruntime.transformers.float16`` have it. Weights keep their values:
    none is moved to ``min_positive_val`` or ``max_finite_val``. Raises ParityRefused."""
    _ignored(
        min_positive_val=min_positive_val != 1e-7,
        max_finite_val=max_finite_val != 1e4,
        keep_io_types=keep_io_types is not True,
        **{name: bool(value) for name, value in others.items()},
    )
    keep = _patterns(model, op_block_list, node_block_list, str.__eq__)
    return _converted(model, None, keep, "fp16")


def convert_float_to_float16_model_path(model_path: str, **parameters: Any) -> ModelProto:
    """`convert_float_to_float16` of a file. Raises ParityRefused."""
    return convert_float_to_float16(onnx.load(model_path), **parameters)


def auto_convert_mixed_precision(
    model: ModelProto,
    feed_dict: Mapping[str, np.ndarray],
    validate_fn: Callable[[Any, Any], bool] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool = False,
) -> ModelProto:
    """As ``onnxconverter_common.auto_mixed_precision`` has it. ``feed_dict`` judges: each row of it is a sample; the
    gate's rules take the place of ``validate_fn``, ``rtol`` and ``atol``. Raises ParityRefused."""
    _ignored(
        validate_fn=validate_fn is not None,
        rtol=rtol is not None,
        atol=atol is not None,
        keep_io_types=not keep_io_types,
    )
    return _converted(model, feed_dict, (), "fp16")


def convert_to_mixed_precision(
    onnx_path: str,
    low_precision_type: str = "fp16",
    nodes_to_exclude: Sequence[str] | None = None,
    op_types_to_exclude: Sequence[str] | None = None,
    calibration_data: str | Mapping[str, np.ndarray] | None = None,
    keep_io_types: bool = False,
    **others: Any,
) -> ModelProto:
    """As ``modelopt.onnx.autocast`` has it; ``calibration_data`` (an npz file or inputs by name) are the samples that
    judge. Bounds by magnitude (``data_max``, ``init_max``), runtimes and plug-ins have no meaning here. Raises
    ParityRefused."""
    _ignored(keep_io_types=not keep_io_types, **{name: value is not None for name, value in others.items()})
    model = onnx.load(onnx_path, load_external_data=False)
    keep = _patterns(
        model, op_types_to_exclude, nodes_to_exclude, lambda one, name: bool(re.match(one, name))
    )
    return _converted(Path(onnx_path), calibration_data, keep, low_precision_type)


def _patterns(
    model: ModelProto,
    ops: Sequence[str] | None,
    nodes: Sequence[str] | None,
    means: Callable[[str, str], bool],
) -> tuple[str, ...]:
    """The nodes of the model that the lists name: as those converters, this passes over what the model does not have.
    ``means``: whether one of ``nodes`` means a name."""
    found = [node for graph in (model.graph, *model.functions) for node in walk(graph)]
    names = dict.fromkeys(node.name for node in found if any(means(one, node.name) for one in nodes or ()))
    types = {node.op_type for node in found}
    return (*map(glob.escape, filter(None, names)), *(f"op:{op}" for op in ops or () if op in types))


def _ignored(**given: bool) -> None:
    named = [name for name, differs in given.items() if differs]
    if named:
        boundary = f"; {_BOUNDARY}" if "keep_io_types" in named else ""
        warnings.warn(f"halfeven.drop_in ignores {', '.join(named)}{boundary}", stacklevel=3)


def _converted(model: ModelProto | Path, samples: Any, keep: Sequence[str], dtype: str) -> ModelProto:
    with TemporaryDirectory(prefix="halfeven-drop-in-") as place:
        source = model if isinstance(model, Path) else Path(place) / "model.onnx"
        if isinstance(model, ModelProto):
            save(model, source)
        made = fp16(source, Path(place) / "half.onnx", samples, keep=keep, dtype=dtype)
        if made.file is None:
            raise ParityRefused(f"no half of {source.name} is proven equal: {made.reason}")
        return onnx.load(made.file)
