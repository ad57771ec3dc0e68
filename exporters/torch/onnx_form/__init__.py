"""A captured program as an ONNX file: written, named, folded, checked."""
