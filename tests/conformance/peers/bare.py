"""Opens another project's package without its own first file, which would start with that project's server."""

import sys
import types
from pathlib import Path


def bare(name: str) -> None:
    """Make ``name.part`` importable from now on; nothing of ``name/__init__.py`` runs."""
    places = [Path(root, *name.split(".")) for root in sys.path]
    module = types.ModuleType(name)
    module.__path__ = [str(place) for place in places if place.is_dir()]
    sys.modules[name] = module
