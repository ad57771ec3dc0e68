"""The precision of every node of a normalised ONNX graph, and the rewrite that gives it that precision."""
