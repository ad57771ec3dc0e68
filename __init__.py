"""halfeven: half precision, even answers."""

from .models.telemetry import switch_off
from .models.version import __version__

switch_off()

__all__ = ["__version__"]
