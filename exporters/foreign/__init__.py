"""The kind of model that comes as an ONNX file of somebody else: read, planned and rewritten on its own graph."""
