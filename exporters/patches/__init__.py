"""Patches of a model's own source, by which more of it can run in half."""
