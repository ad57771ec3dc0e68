"""The ranges of a program's tensors, the nodes that are in danger in half, and exact rewrites that avoid it."""
