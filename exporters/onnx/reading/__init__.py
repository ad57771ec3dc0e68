"""An ONNX file as it was given, brought to the normalised graph that is planned: opset, names, constants, batch."""
