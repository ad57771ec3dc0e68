"""The precision of each class of operation, for captured programs and ONNX files."""
