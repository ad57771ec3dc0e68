"""The number of the release; it is written only here."""

__version__ = "0.1.0"
