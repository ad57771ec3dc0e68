"""The module of a live model, built from the operator's own folder, whose text must be the one that was proven; and the
imports of that folder's files, which no other model sees."""

import builtins
import importlib
import itertools
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from ..capture import failures, sources
from ..capture.failures import Refused
from ..errors import BadFolder, CaptureFailed, EngineFailed
from ..store.manifest import sha256_of
from .true_fp32 import use_true_fp32

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

    Two folders of operators, and the server, may each have a ``layers.py``. A live model's files are imported under a
    name of their own (``_halfeven_live_3.layers``). An ``import layers`` anywhere in them, also one inside a function
    that runs much later and in another thread, finds that module, because each of these modules has an ``__import__``
    of its own. ``sys.path`` is never changed: no file of the operator can hide a module of ours, of torch or of Python.

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


# The files that a module may be made from. Not model.toml: the version has its own spec and precision.
TEXT_SUFFIXES = (".py", ".json", ".toml", ".txt", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class LiveSource:
    """A model folder's code: ``source`` is ``model.py:build`` or ``hf:.``, ``path`` the further import roots."""

    folder: Path
    source: str
    path: tuple[Path, ...] = ()

    def text(self) -> dict[str, str]:
        """Every text file of the folder and every file imported from it or from a root, with its SHA-256."""
        own = self._own_text()
        return own | self._imports(own).files

    def build(self, proven: Mapping[str, str] | None = None) -> nn.Module:
        """Run the operator's code: the module in evaluation, without gradients, in FP32.

        Its weights are its own, or those of a transformers folder. ``proven``: the only files that may be imported
        from the folder and its roots. The random state, the default dtype, ``sys.path`` and TF32 are restored
        afterwards. Raises BadFolder, or CaptureFailed with the end of the user's own traceback.
        """
        if not self.folder.is_dir():
            raise BadFolder(
                f"the model folder {self.folder} does not exist any more: put it back, or convert again"
            )
        try:
            with _settings_kept():
                module = self._transformers() if self.source.startswith("hf:") else self._built()
                sources.widen(torch, module)
        except Refused as error:
            raise BadFolder(f"{self.folder}: {error}") from None
        except (Exception, SystemExit) as error:
            raise CaptureFailed(
                f"the model code in {self.folder} cannot be run: {self.described(error)}"
            ) from error
        if proven is not None:
            self._check_imports(proven)
        return module.eval().requires_grad_(False)

    def check(self, proven: Mapping[str, str]) -> None:
        """Check the files against those of the proof. Raises EngineFailed naming a file that has changed since."""
        here = self._own_text()
        there = {file: sha256_of(Path(file)) for file in proven if file not in here and Path(file).is_file()}
        found = here | there
        for file in sorted(proven.keys() | here.keys()):
            if found.get(file) != proven.get(file):
                what = "is gone" if file not in found else "has changed" if file in proven else "is new"
                raise self._unproven(file, what)

    def described(self, error: BaseException) -> str:
        """The user's error with the end of its traceback."""
        roots = {
            "folder": str(self.folder),
            "path": [str(root) for root in self.path],
            "source": self.source,
        }
        hint = ""
        if isinstance(error, FileNotFoundError) and error.filename and not Path(error.filename).is_absolute():
            hint = " (the live form leaves the working directory alone: open files beside __file__)"
        if isinstance(error, ImportError):
            hint = failures.where_imports_are_found(error, roots)
        return f"{type(error).__name__}: {failures.first_lines(error)}{hint}\n{failures.tail(error, roots).rstrip()}"

    def place(self, error: BaseException) -> str:
        """The innermost line of the operator's that an error passed: callers see no path of this machine."""
        frames = traceback.extract_tb(error.__traceback__)
        roots = {self.folder, *self.path}
        own = [frame for frame in frames if roots & set(Path(frame.filename).parents)]
        return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""

    def _built(self) -> nn.Module:
        file = self.source.partition(":")[0]
        imported = self._imports(self._own_text()).module(self.folder / file)
        return sources.module_of(torch, imported, self.source)

    def _transformers(self) -> nn.Module:
        module = sources.transformers_module(torch, self.folder / self.source[3:], "sdpa")
        if lacking := getattr(module, "lacking", ()):
            raise Refused(f"the checkpoint has no weights for {list(lacking)[:5]}: they would be random")
        return module

    def _imports(self, own: Mapping[str, str]) -> PrivateImports:
        return imports_of((self.folder, *self.path), own)

    def _check_imports(self, proven: Mapping[str, str]) -> None:
        for file, sha in self._imports(self._own_text()).files.items():
            if proven.get(file) != sha:
                raise self._unproven(file, "is imported, which it was not,")

    def _unproven(self, file: str, what: str) -> EngineFailed:
        return EngineFailed(
            f"{file} {what} since the live form of {self.folder.name} was proven: only the proven text may "
            "run; convert the folder again, or restore its files"
        )

    def _own_text(self) -> dict[str, str]:
        return {str(file): sha256_of(file) for file in self._files()}

    def _files(self) -> list[Path]:
        found = []
        for file in sorted(self.folder.rglob("*")):
            inside = file.relative_to(self.folder)
            hidden = any(part.startswith((".", "__pycache__", "halfeven-store")) for part in inside.parts)
            if not hidden and file.suffix in TEXT_SUFFIXES and inside.name != "model.toml" and file.is_file():
                found.append(file)
        return found


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Restore the process-wide settings that a model's code may change when it is imported; seed 0, as at capture."""
    path, dtype, threads = sys.path[:], torch.get_default_dtype(), torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        sys.path[:] = path
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        use_true_fp32()
