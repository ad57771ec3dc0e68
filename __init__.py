"""halfeven: half precision, even answers."""

# By its whole name: pytest imports this file by its path where the checkout's folder is no Python name (halfeven-main).
from halfeven.models.version import __version__

__all__ = ["__version__"]
