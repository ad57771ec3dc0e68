"""halfeven: half precision, even answers."""

__version__ = "0.1.0"
