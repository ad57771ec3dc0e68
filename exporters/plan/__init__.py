"""What is half and what stays in FP32: decided once for every back end."""
