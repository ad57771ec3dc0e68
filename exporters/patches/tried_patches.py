"""Tries changes of a model folder's own source, each in a copy: converted and proven as the folder itself was.

A patch counts where the patched module's FP32 answers hold against the original's under the gate's own limits, its half
is proven equal to it, and fewer nodes are kept in FP32 than before. The operator's files are only read.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ...models.engines.load import load_original
from ...models.engines.true_fp32 import use_true_fp32
from ...models.errors import BadInput, HalfevenError, OutOfTime
from ...models.folder.package import ModelFolder
from ...models.order.one_order import one_order
from ...models.python_text.python_script import BadScript, Script, read_script
from ...models.store.store import LIVE, Store, Version
from ..conversion.convert import Conversion, Options, convert, signature_change
from ..gate.refusals import without_advice
from ..gate.verdict import ParityReport
from ..guessing.bare import TOML, folder_at
from ..inputs.drifted_inputs import folder_of
from ..inputs.samples import stored_samples
from ..on_device.reprove import reference_run_of
from ..proof.maker import Notify
from ..proof.prove import ReferenceRun, answers_of, judged, take
from ..proof.subject import CPU
from ..report.evidence import files_of
from .known_patterns import Change, changed, changes_of

MOST = 16  # changes that are tried one by one
LONGER = 1.5  # times the longest conversion so far: the next may take so long
ALL = "all"  # the kind of the last patch: all that gained
Place = tuple[Path, Change]  # a file, relative to the model folder, and a change of it


@dataclass(frozen=True, slots=True)
class TriedPatch:
    """One patch after its trial. ``error_u``: of the patched half against the patched FP32 module; ``moved_u``: of the
    patched FP32 module against the original; both None where it did not come to that. ``why``: why the patch does not
    count; empty where it does. ``texts``: the patched files."""

    kind: str
    place: str
    texts: Mapping[Path, str]
    kept: int | None = None
    error_u: float | None = None
    moved_u: float | None = None
    why: str = ""


def check_patchable(folder: ModelFolder) -> None:
    """Raises BadInput for a model that has no Python code of its own."""
    if folder.kind != "python":
        raise BadInput(
            f"--patches: {folder.source} has no Python code of its own to patch: expected a model folder whose source "
            "is file.py:function"
        )


class PatchTrials:
    """The trials of one converted folder. ``kept``: how many nodes are kept in FP32 before; ``nodes``: of how many."""

    def __init__(
        self, folder: Path, done: Conversion, store: Store, options: Options, notify: Notify
    ) -> None:
        self.folder = folder_at(folder, options.samples, options.name)
        self.version, self.options, self.notify = done.version, options, notify
        self._drifted = folder_of(store, done.version.name)
        self._plan = self.version.json("precision.json")
        self.kept, self.nodes = len(self._plan["kept"]), len(self._plan["nodes"])
        self.passed = {name for name, form in done.facts["forms"].items() if form["passed"]}
        self.limit_u = self.version.spec().parity.max_error_u
        self.scripts = self._read()
        self.places = self._places()

    def go(self) -> Iterator[TriedPatch]:
        """Every patch when it was tried, as far as the order's time reaches; the last is all that gained together,
        where several did."""
        use_true_fp32()
        found = []
        with one_order() as order:
            left_s = order.left_s
            longest_s = order.bounds.seconds - left_s  # the folder itself was converted in it
        for number, place in enumerate(self.places[:MOST], 1):
            if left_s < LONGER * longest_s:
                return
            self.notify(f"trying patch {number} of {min(len(self.places), MOST)}")
            found.append((place, self._tried([place])))
            longest_s, left_s = max(longest_s, left_s - order.left_s), order.left_s
            yield found[-1][1]
        gained = [place for place, patch in found if not patch.why]
        together = list[Place]()
        for path, change in gained:
            if not any(path == other and change.overlaps(one) for other, one in together):
                together.append((path, change))
        if len(together) > 1 and left_s >= LONGER * longest_s:
            yield self._all(together, found)

    def _all(self, together: Sequence[Place], found: Sequence[tuple[Place, TriedPatch]]) -> TriedPatch:
        self.notify("trying all patches together")
        patch = self._tried(together)
        best = min(one.kept for _, one in found if not one.why and one.kept is not None)
        if patch.why or (patch.kept or 0) < best:
            return patch
        return replace(patch, why=f"{patch.kept} nodes are kept in FP32, and {best} with one of them alone")

    def _read(self) -> dict[Path, Script]:
        """The folder's Python files that can be patched: lines end with a line feed alone, so that a diff is exact."""
        found = {}
        for path in files_of(self.folder.folder):
            if path.suffix != ".py" or "site-packages" in path.parts:
                continue
            try:
                script = read_script(path)
            except (BadScript, OSError):
                continue  # no module that was captured, which was imported
            if path.read_bytes() == "".join(f"{line}\n" for line in script.lines).encode():
                found[path.relative_to(self.folder.folder)] = script
        return found

    def _places(self) -> list[Place]:
        found = []
        for path, script in self.scripts.items():
            rows = (str(one.get("source", "")).rpartition(":") for one in self._plan["kept"])
            kept = {int(line) for name, _, line in rows if name == path.name}
            found += [(path, change) for change in changes_of(script, kept)] if kept else []
        return found

    def _tried(self, places: Sequence[Place]) -> TriedPatch:
        files = {path for path, _ in places}
        texts = {
            path: changed(self.scripts[path], [change for other, change in places if other == path])
            for path in files
        }
        first, change = places[0]
        kind, place = (change.kind, f"{first}:{change.line}") if len(places) == 1 else (ALL, "")
        patch = TriedPatch(kind, place, texts)
        with tempfile.TemporaryDirectory(prefix="halfeven-patch-") as made:
            copy, store = self._copied(Path(made) / "folder", texts), Store(Path(made) / "store")
            _link(folder_of(store, self.folder.spec.name), self._drifted)
            try:
                return self._measured(patch, convert(copy, store, self.options))
            except OutOfTime:
                raise
            except HalfevenError as error:
                return replace(patch, why=f"the patched folder is not converted: {error}")

    def _measured(self, patch: TriedPatch, done: Conversion) -> TriedPatch:
        version, forms = done.version, done.facts["forms"]
        kept = len(version.json("precision.json")["kept"])
        patch = replace(patch, kept=kept)
        passed = {name for name, form in forms.items() if form["passed"]}
        if (
            version.status != LIVE
            or not passed
            or version.manifest["half"] is None
            or not self.passed <= passed
        ):
            return replace(patch, why=f"its half is not proven: {version.manifest['reason']}")
        patch = replace(patch, error_u=max(forms[name]["max_error_u"] for name in passed))
        if kept >= self.kept:
            return replace(patch, why=f"{kept} nodes are kept in FP32 with it, {self.kept} without")
        if _in_fp32(version) >= _in_fp32(self.version):
            return replace(patch, why="as many nodes are in FP32 as without it, by the policy")
        if signature_change(self.version.spec(), version.spec()):
            return replace(patch, why="its inputs or outputs are others")
        report = self._against_original(version)
        worst = max((one.max_error_u for one in report.outputs), default=0.0)
        refused = without_advice(report.all_failures[0]).message if report.all_failures else ""
        why = f"its FP32 answers are others: {refused}" if refused else ""
        return replace(patch, moved_u=worst, why=why)

    @cached_property
    def _run(self) -> ReferenceRun:
        """The original's own answers to the questions of its proof."""
        return reference_run_of(self.version, self._plan["dtype"], CPU, stored_samples(self.version))

    def _against_original(self, version: Version) -> ParityReport:
        """The gate's report on the patched FP32 module, which takes the place of a half of the original."""
        engine = load_original(version, "torch", CPU)
        try:
            return judged(
                self._run, self._plan["dtype"], [take(self._run, answers_of(self._run.spec, engine))]
            )
        finally:
            engine.close()

    def _copied(self, place: Path, texts: Mapping[Path, str]) -> ModelFolder:
        """The folder with the patched files at ``place``; its weights and samples are read where they are."""
        own = self.folder.folder
        for path in filter(Path.is_file, files_of(own)):  # an editor's dangling link is no file
            target = place / path.relative_to(own)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".py" or path.name == TOML:
                shutil.copyfile(path, target)
            else:
                target.symlink_to(path)  # it may be large, and is read at its own place
        for path, text in texts.items():
            (place / path).write_text(text, encoding="utf-8", newline="\n")
        roots = tuple(
            place / root.relative_to(own) if root.is_relative_to(own) else root for root in self.folder.path
        )
        return replace(self.folder, folder=place, path=roots)


def _link(path: Path, folder: Path) -> None:
    """Make ``path`` a link to a folder: kept inputs are private, change meanwhile, and are read where they are."""
    path.parent.mkdir(parents=True)
    path.symlink_to(folder.absolute())


def _in_fp32(version: Version) -> int:
    """The nodes that are not half, kept or by policy."""
    forms = version.manifest["forms"].values()
    return max((form["nodes"] - form["half_nodes"] for form in forms if "nodes" in form), default=0)
