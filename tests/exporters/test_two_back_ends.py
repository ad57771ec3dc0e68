"""A module and its own exported file are planned alike: the same status, search, verdict, kept ops and sections."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.onnx.forms import foreign_subject
from halfeven.exporters.policy.classes import class_of
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.errors import CannotConvert
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.store.store import Store, Version

from tests.conversions import samples_of
from tests.corpus import CORPUS, captured, of_a_run
from tests.slow import EVERY_CASE, slow_but

# Below O3 a search is always made.
ASKED = [("O0", False), ("O1", False), ("O2", False), ("O3", False), ("O3", True)]
FEW = ["gate"]  # run always; the others are slow
# All levels of all models take an hour: unless EVERY_CASE is set, an eighth of the others is asked, each at one level.
HEAVY = ["zoo unet", "deep stack"]  # a search at O3 takes them minutes: they are asked at O1
# Sections that are shown only where there is something to show.
OWN = {
    "recommendation": "not to convert: what casts move differs with the graph",
    "repairs": "which masks and overflows can be rewritten exactly is proven on the graph itself",
}
NAME = "model"  # not every name of the corpus is one that a store takes
FORM = "onnx"


@dataclass(frozen=True)
class Outcome:
    """The results of a conversion; ``status`` is the error's sentence where the conversion left nothing."""

    status: str
    facts: Mapping[str, Any]
    sections: frozenset[str]
    ops: Counter[str]

    @property
    def kept(self) -> Counter[str]:
        return Counter(classed(kept["op"]) for kept in self.facts["kept"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, bool], tuple[Outcome, Outcome]]:
    """The module's ONNX form, and the FP32 file that was written with it, converted as a file."""

    @cache
    def convert(name: str, level: str, search: bool) -> tuple[Outcome, Outcome]:
        folder = tmp_path_factory.mktemp("both")
        original, samples, store = captured(name), samples_of(name, 32, seed=1), Store(folder / "store")
        spec, precision = replace(original.spec, name=NAME), Precision(level)
        subject = Subject(original.program, spec, samples, precision, (FORM,), folder, {}, search=search)
        try:
            first = travel(subject, ProgramForms(subject), store, lambda _: None)
        except CannotConvert as error:
            pytest.skip(f"it does not export: {error}")
        asked = ModelFolder(first.folder, "original.onnx", (), None, None, spec, precision)
        second = travel(*foreign_subject(asked, samples, {}, search, lambda _: None), store, lambda _: None)
        return outcome(first), outcome(second)

    return convert


def outcome(version: Version) -> Outcome:
    plan, report = version.json("precision.json"), version.json("parity.json")
    ops = Counter(classed(node["op"]) for node in plan["nodes"])
    return Outcome(version.status, version.manifest["forms"][FORM], frozenset(report), ops)


def classed(op: str) -> str:
    """The class of an operation; its own name where it is in no class."""
    found = class_of(op).name
    return op.lower() if found == class_of("").name else found


# A region that the module's author took out of autocast stays in FP32; an FP32 file has no word for it.
AUTHORS_REGION_IS_LOST = [("autocast off", "O3", False)]

# A part that the author wrote in half stays half in a module at every level; a file is widened first, and nothing of
# it is half at O0.
NOTHING_TO_JUDGE = [("own half", "O0", False)]

# At O1 autocast leaves the table of a module's embedding in FP32 (`embeddings = "keep"`); a file's Gather follows its
# readers. Most bytes of this model are such a table: its module's half would save nothing and is not made.
TABLE_STAYS_IN_FP32 = [("sinusoidal table", "O1", False)]

Both = Callable[[str, str, bool], tuple[Outcome, Outcome]]
ALWAYS = [(name, level, search) for name in FEW for level, search in ASKED]
EACH = [
    (name, level, search)
    for place, name in enumerate(CORPUS)
    if name in {*FEW, *of_a_run()}
    for level, search in (
        ASKED if EVERY_CASE or name in FEW else [ASKED[1 if name in HEAVY else place % len(ASKED)]]
    )
]
every_case = pytest.mark.parametrize(("name", "level", "search"), slow_but(ALWAYS, EACH))


@pytest.mark.slow
@every_case
def test_a_module_and_its_file_end_alike(name: str, level: str, search: bool, both: Both) -> None:
    """The same exit code and verdict, and neither is searched where the other is not."""
    module, file = both(name, level, search)
    if (name, level, search) in AUTHORS_REGION_IS_LOST:
        assert module.ops != file.ops and (module.status, file.status) == ("live", "refused")
        return
    assert (file.status, file.facts["passed"]) == (module.status, module.facts["passed"])
    assert (file.facts["search"] == "not asked") == (module.facts["search"] == "not asked")


@pytest.mark.slow
@every_case
def test_where_the_graphs_agree_the_same_operations_stay_in_fp32(
    name: str, level: str, search: bool, both: Both
) -> None:
    module, file = both(name, level, search)
    if module.ops == file.ops:
        assert file.kept == module.kept


@every_case
def test_their_reports_have_the_same_sections(name: str, level: str, search: bool, both: Both) -> None:
    module, file = both(name, level, search)
    if (name, level, search) in TABLE_STAYS_IN_FP32:
        assert "would save" in module.facts["original_because"] and file.facts["half_nodes"]
        return
    judged = {"worst"} if (name, level, search) in NOTHING_TO_JUDGE else set()
    assert (file.sections | judged) - {*OWN} == module.sections - {*OWN}


@pytest.mark.slow
def test_at_o3_without_a_search_both_are_refused_and_with_one_both_are_live(both: Both) -> None:
    for search, status in ((False, "refused"), (True, "live")):
        assert [one.status for one in both("gate", "O3", search)] == [status] * 2
