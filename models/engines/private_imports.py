"""The operator's modules beside those of the server: two folders may both have a ``layers.py``.

A live model's files are imported under a name of their own (``_halfeven_live_3.layers``). An ``import layers``
anywhere in them, also one inside a function that runs much later and in another thread, finds that module, because
each of these modules has an ``__import__`` of its own. ``sys.path`` is never changed: no file of the operator
can hide a module of ours, of torch or of Python.
"""

import builtins
import importlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..store.manifest import sha256_of

# The capture's child has these before it has the folder: a sibling of such a name is never found there either.
_NEVER_OURS = sys.stdlib_module_names | {"torch", "numpy"}
_NUMBERS = itertools.count(1)
_known: dict[tuple[object, ...], "PrivateImports"] = {}


def imports_of(roots: Sequence[Path], text: Mapping[str, str]) -> "PrivateImports":
    """The imports from these roots with this text (file → SHA-256).

    Shared in a process while no imported file has changed: what registers itself with torch (custom ops) can
    do so once only.
    """
    key = (*roots, *sorted(text.items()))
    found = _known.get(key)
    if found is None or not found.current:
        found = _known[key] = PrivateImports(roots)
    return found


class PrivateImports:
    """Files of some import roots, each imported once, under a package name that is used only for them.

    ``files``: the imported files by path, with the SHA-256 of their text.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self.files: dict[str, str] = {}
        self._package = f"_halfeven_live_{next(_NUMBERS)}"
        self._is_ours: dict[str, bool] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}
        package = ModuleType(self._package)
        package.__path__ = [str(root) for root in roots]
        sys.modules[self._package] = package
        sys.meta_path.insert(0, self)

    @property
    def current(self) -> bool:
        """True if every imported file is still as it was then."""
        return all(Path(file).is_file() and sha256_of(Path(file)) == sha for file, sha in self.files.items())

    def module(self, file: Path) -> ModuleType:
        """The module that a file is; it runs the first time it is asked for. Raises what its code raises."""
        name = f"{self._package}.{file.stem}"
        if name not in sys.modules:
            spec = spec_from_file_location(name, file, loader=_Source(name, str(file), self._builtins))
            assert spec is not None
            self.files[str(file)] = sha256_of(file)
            sys.modules[name] = module_from_spec(spec)
            try:
                _run(spec, sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """The finder in ``sys.meta_path``, asked at every import that is new to the process; it finds the package's
        files."""
        if not name.startswith(f"{self._package}."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            self.files[spec.origin] = sha256_of(Path(spec.origin))
            if isinstance(spec.loader, SourceFileLoader):
                spec.loader = _Source(name, spec.origin, self._builtins)
        return spec

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """``__import__`` of every module of the roots."""
        top = name.partition(".")[0]
        if level or not self._found_here(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if fromlist:
            return builtins.__import__(f"{self._package}.{name}", globals, locals, fromlist, 0)
        importlib.import_module(f"{self._package}.{name}")
        return sys.modules[f"{self._package}.{top}"]

    def _found_here(self, top: str) -> bool:
        if top not in self._is_ours:
            self._is_ours[top] = top not in _NEVER_OURS and self._in_the_roots(top)
        return self._is_ours[top]

    def _in_the_roots(self, top: str) -> bool:
        """True if the name is in the roots, searched as ``sys.path`` is: a file or package of the roots comes first, a
        mere folder last."""
        spec = PathFinder.find_spec(f"{self._package}.{top}", [str(root) for root in self.roots])
        if spec is None or spec.origin is not None:
            return spec is not None
        return top not in sys.modules and find_spec(top) is None


class _Source(SourceFileLoader):
    """Compiles the text that is there: no cached code, whose text may have been another, and none is written."""

    def __init__(self, name: str, path: str, its_builtins: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._builtins = its_builtins

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        super().exec_module(module)


def _run(spec: ModuleSpec, module: ModuleType) -> None:
    assert spec.loader is not None
    spec.loader.exec_module(module)
