"""The planner: which nodes are half and which stay in FP32, decided once for every back end."""
