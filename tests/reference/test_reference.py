"""The reference pages say what the code says: each is made again here and compared."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house_sources import ROOMS, ROOT
from tests.reference import pages
from tests.reference.model_schema import model_schema
from tests.reference.pages import error_classes, job_codes, said_of

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def made() -> dict[str, Callable[[], str]]:
    return pages.pages()


def test_no_page_is_stale(made: dict[str, Callable[[], str]]) -> None:
    stale = [place for place, make in made.items() if (ROOT / place).read_text() != make()]
    assert not stale, f"{stale}: run `make reference`"
    beside = {str(file.relative_to(ROOT)) for file in DOCS.glob("reference/*")}
    assert beside <= set(made)


def test_every_error_says_what_it_means_and_what_to_do() -> None:
    kinds = error_classes()
    assert len(kinds) > 50
    for code, kind in kinds.items():
        sentences = re.findall(r"[.:](?: |$)", said_of(kind))
        assert (said_of(kind).endswith(".") and len(sentences) >= 2) or code in ("error", "not_run"), code


def test_every_code_of_a_job_is_in_the_pages() -> None:
    found = job_codes()
    assert {"WORKER_LOST", "BAD_DATA", "NOT_SERVED", "USER_CODE"} <= set(found) and all(
        map(str.isupper, found)
    )


def test_a_line_of_the_log_is_no_message_of_an_error() -> None:
    page = pages.messages()
    assert "`bad_model_folder`" in page and not re.search("%[sdg]", page)


def test_every_variable_that_code_and_manifests_name_is_in_the_page() -> None:
    page, found = (DOCS / "reference/environment.md").read_text(), dict[str, Path]()
    for folder, ending in ((ROOT / "docker", "*"), *((ROOT / one, "py") for one in ROOMS)):
        for file in (one for one in folder.rglob(f"*.{ending}") if one.is_file()):
            found |= dict.fromkeys(
                re.findall(r"\bHALFEVEN_[A-Z_]*[A-Z]\b", file.read_text(errors="ignore")), file
            )
    kept = {name: file for name, file in found.items() if not name.startswith("HALFEVEN_TEST")}
    unknown = {name: file for name, file in kept.items() if f"`{name}`" not in page}
    assert len(kept) > 15 and not unknown


def test_every_call_of_grpc_is_explained() -> None:
    protocol = (DOCS / "protocol.md").read_text()
    calls = re.findall(r"rpc (\w+)\(", (ROOT / "serve/grpc/open_inference.proto").read_text())
    assert len(calls) > 10 and not [name for name in calls if f"`{name}`" not in protocol]


def test_the_packaged_schema_is_the_one_that_the_readers_have(unpacked_wheel: Path) -> None:
    packaged = json.loads((unpacked_wheel / "halfeven/models/model-toml.schema.json").read_text())
    assert packaged == model_schema() == json.loads(pages.schema())
