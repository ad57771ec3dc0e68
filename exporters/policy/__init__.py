"""What each class of operation computes in, for captured programs and for ONNX files alike."""
