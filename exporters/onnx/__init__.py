"""The kind of model that is given as an ONNX file: read, planned and rewritten on its own graph."""
