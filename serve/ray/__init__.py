"""halfeven on many machines, by Ray Serve (docs/ray.md)."""

from .application import app as app
from .options import Options as Options
