"""Builds one exported half with TensorRT-RTX, without a GPU, and compares its tensors' types with the file's.

    python -m tests.benchmarks.tensorrt_build FOLDER PROFILE.json

A process of its own for each file: a crash of the library ends no other. The last line on stdout is a JSON object.
Needs the package tensorrt-rtx, which is proprietary; nothing of halfeven is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import tensorrt_rtx as trt  # type: ignore[import-not-found]
from onnx import TensorProto

TYPES: dict[int, str] = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.DOUBLE: "FLOAT",  # TensorRT has no FP64: it computes such values in FP32
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT64: "INT64",
    TensorProto.INT32: "INT32",
    TensorProto.INT8: "INT8",
    TensorProto.UINT8: "UINT8",
    TensorProto.BOOL: "BOOL",
}


def types_of(path: Path) -> dict[str, str]:
    """Every value that a node of the file's graph gives, with the type that it has in TensorRT."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True)
    values = (*model.graph.value_info, *model.graph.output)
    known = {value.name: TYPES.get(value.type.tensor_type.elem_type, "other") for value in values}
    given = {name for node in model.graph.node if node.op_type != "Constant" for name in node.output}
    return {name: type_ for name, type_ in known.items() if name in given}


def build(path: Path, profile: dict[str, tuple[list[int], list[int], list[int]]]) -> dict[str, Any]:
    """``refused``: the library's own words where it does not parse or build the file, else empty."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        words = "; ".join(parser.get_error(place).desc() for place in range(parser.num_errors))
        return {"refused": f"not parsed: {words}"}
    wanted = types_of(path)
    layers = [network.get_layer(place) for place in range(network.num_layers)]
    tensors = [layer.get_output(place) for layer in layers for place in range(layer.num_outputs)]
    came = {tensor.name: tensor.dtype.name for tensor in tensors if tensor is not None}
    shared = wanted.keys() & came.keys()
    facts = {
        "nodes": len(wanted),
        "layers": len(layers),
        "compared": len(shared),
        "half": sum(wanted[name] in ("HALF", "BF16") for name in shared),
        "different": sorted(
            f"{name}: {wanted[name]} became {came[name]}" for name in shared if wanted[name] != came[name]
        ),
        "strongly_typed": network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED),
    }
    config = builder.create_builder_config()
    if profile:
        shapes = builder.create_optimization_profile()
        for name, (least, usual, most) in profile.items():
            shapes.set_shape(name, least, usual, most)
        config.add_optimization_profile(shapes)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    engine = builder.build_serialized_network(network, config)
    return {**facts, "refused": "" if engine else "not built", "bytes": engine.nbytes if engine else 0}


if __name__ == "__main__":
    folder, shapes = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps(build(folder / "half.onnx", shapes)))
