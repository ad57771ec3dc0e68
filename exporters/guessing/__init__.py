"""Guesses model.toml where a model comes without one."""
