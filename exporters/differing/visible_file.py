"""The file of a model with every floating inner tensor as an output: a server of it shows `diff` where it errs."""

from pathlib import Path

from onnx import TensorProto, ValueInfoProto, helper

from ...models.errors import BadSetting, NotRun
from ...models.files.durable import drafted
from ..onnx.reading.graph import element_type_of
from ..onnx.reading.large_files import DATA, save
from ..onnx.runtime import session_of
from .onnx_side import OnnxSide

# Tensors of indices and sizes are not made visible: few of them have a row for each sample.
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


def write_visible(a: OnnxSide, target: Path) -> list[str]:
    """Write the file of ``a`` as ``target``; gives the names of the tensors that became outputs.

    Raises BadSetting where ``target`` is no new ONNX file, NotRun where ONNX Runtime, which knows the types of the
    tensors, does not load the file of ``a``.
    """
    there = target.exists() or target.with_name(target.name + DATA).exists()
    if target.suffix != ".onnx" or there or not target.parent.is_dir():
        raise BadSetting(
            f"--visible {target}: expected a new file in a folder that is there, such as visible.onnx"
        )
    made = a.watched({})
    try:
        shown = session_of(made).get_outputs()
    except Exception as error:  # ONNX Runtime has no narrower one
        raise NotRun(f"ONNX Runtime does not load {a.path}: {str(error)[:400]}") from error
    hidden = {name for node in a.model.graph.node if node.op_type == "Constant" for name in node.output}
    inner = [
        _declared(a, value.name, kind, value.shape)
        for value in shown
        if (kind := element_type_of(value.type)) in _FLOATS and value.name not in hidden | a.outputs.keys()
    ]
    del made.graph.output[len(a.outputs) :]
    made.graph.output.extend(inner)
    with drafted(target) as draft:
        save(made, draft)
    return [value.name for value in inner]


def _declared(a: OnnxSide, name: str, kind: int, shape: list[int | str | None]) -> ValueInfoProto:
    """The tensor with the shape that the graph says: ONNX Runtime gives none for a scalar and for an unknown rank."""
    known = a.types.get(name)
    if known is not None and known.tensor_type.HasField("shape"):
        return ValueInfoProto(name=name, type=known)
    return helper.make_tensor_value_info(name, kind, shape or None)
