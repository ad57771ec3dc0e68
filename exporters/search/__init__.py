"""The fewest nodes that must stay in FP32, found by asking."""
