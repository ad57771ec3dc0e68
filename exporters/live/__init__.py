"""The kind of model that cannot be captured: the module itself under autocast, with FP32 islands."""
