"""halfeven: half precision, even answers."""

from .models.version import __version__

__all__ = ["__version__"]
