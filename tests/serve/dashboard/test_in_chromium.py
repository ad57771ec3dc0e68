"""The pages in a real browser: at 360 pixels and dark, at 1,280 and light, nothing scrolls sideways, and axe-core finds
nothing serious (contrast AA among it). And what only a browser shows: the script, the forms, the page without a script.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from halfeven.exporters.report.page import render_html
from halfeven.models.store.store import REFUSED, Store
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.finetune.jobs.records.database import DATABASE
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest
from halfeven.serve.finetune.web.job_page import render_job
from playwright.sync_api import Page, expect, sync_playwright

from tests.exporters.report.page_facts import FINDINGS, facts, report
from tests.patience import until
from tests.serve.dashboard.conftest import busy
from tests.serve.finetune.web.shown_job import a_job, the_gate, the_steps
from tests.serve.versions.traffic.conftest import Versions, call, infer, publish, serving, spec

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `apt-get install chromium` brings one"),
]
SIZES = [(360, "dark"), (1280, "light")]  # no rule of our style sheets asks for both
WIDE = "document.documentElement.scrollWidth"
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def opened(browser: Any, width: int = 1280, scheme: str = "light", **more: Any) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **more)
    page = context.new_page()
    page.faults = []
    page.on("console", lambda said: page.faults.append(said.text) if said.type == "error" else None)
    yield page
    context.close()


def faults_of(page: Page, width: int) -> list[str]:
    """The faults that axe-core calls serious or critical, with the element; and a page wider than the window."""
    page.evaluate(OPEN_ALL)
    found = [] if page.evaluate(WIDE) <= width else [f"{page.evaluate(WIDE)} pixels wide"]
    for fault in Axe().run(page).response["violations"]:
        if fault["impact"] in ("serious", "critical"):
            found += [f"{fault['id']}: {node['html'][:200]}" for node in fault["nodes"]]
    return found


@pytest.fixture
def everything(versions: Versions, store: Store, random: Any) -> Iterator[tuple[str, Any]]:
    """A server with something of everything on its pages: reports, traffic, events, jobs, a canary, a shadow, drift."""
    publish(store, REFUSED)
    other = spec(name="a-model-whose-name-is-so-long-that-it-does-not-fit-on-a-telephone-at-all", width=90)
    page = render_html(facts(report(random, 3e-3)) | FINDINGS)
    store.promote(publish(store, of=other, report=page))
    publish(store, of=spec(name="never-ready"))
    jobs = JobStore(store.root / DATABASE)
    jobs.add_file(FileRecord("file-1", "0" * 64, 3, "rows.npz", 1))
    job, _ = jobs.create_job(JobRequest("net", "net", 1, "file-1", {"n_epochs": 2}, 3, asked={}), None)
    jobs.request_pause(job.id)
    jobs.close()
    with serving(store, watch_faults=1000, parity_sample=1.0, drift_over=100, drift_of=100) as (
        address,
        roster,
    ):
        assert call(address, "/v1/models/net/canary", {"version": 2, "percent": 10})[0] == 200
        assert call(address, "/v1/models/net/shadow", {"version": 3, "percent": 50})[0] == 200
        for _ in range(20):
            infer(address)
        for served in roster.all():
            served.recent._bins.extend(busy(index) for index in range(60))
        yield address, roster


def test_every_page_fits_and_can_be_read(
    browser: Any, everything: tuple[str, Any], tmp_path: Path, random: Any
) -> None:
    address, _ = everything
    job = call(address, "/v1/fine_tuning/jobs")[1]["data"][0]["id"]
    names = [one["name"] for one in call(address, "/v1/models")[1]["models"]]
    steps = the_steps(40, {7: "gradient overflow", 21: "non-finite loss"})
    events = [{"created_at": 0, "level": "warn", "message": "step 7 is skipped"}]
    (tmp_path / "job.html").write_text(render_job(a_job(gate=the_gate()), steps, events))
    (tmp_path / "report.html").write_text(render_html(facts(report(random, 1e-4)) | FINDINGS))
    pages = [
        f"http://{address}{path}"
        for path in ("/", "/events", "/jobs", "/docs", "/nothing", f"/v1/fine_tuning/jobs/{job}/page")
    ]
    pages += [f"http://{address}/models/{name}" for name in names]
    pages += [f"http://{address}/v1/models/{max(names, key=len)}/versions/1/report"]
    pages += [(tmp_path / name).as_uri() for name in ("job.html", "report.html")]
    found = {}
    for width, scheme in SIZES:
        with opened(browser, width, scheme) as page:
            for url in pages:
                page.goto(url)
                if faults := faults_of(page, width):
                    found[width, url] = faults
    assert found == {}


def test_what_moves_is_put_in_without_losing_what_is_typed(browser: Any, everything: tuple[str, Any]) -> None:
    address, roster = everything
    with opened(browser) as page:
        page.goto(f"http://{address}/models/net")
        page.fill("textarea", "[1, 2, 3, 4]")
        before = page.inner_text("#now")
        roster.served("net").prepared.reason = "for the reason 4711"
        page.evaluate("document.activeElement.blur()")
        page.get_by_text("for the reason 4711").wait_for()
        assert "4711" not in before and page.input_value("textarea") == "[1, 2, 3, 4]"
        assert page.faults == []  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("script", [True, False])
def test_a_person_tries_a_model_and_makes_another_version_active_by_keyboard(
    browser: Any, everything: tuple[str, Any], script: bool
) -> None:
    address, roster = everything
    with opened(browser, java_script_enabled=script) as page:
        page.goto(f"http://{address}/")
        page.get_by_role("link", name="net", exact=True).press("Enter")
        page.get_by_role("textbox", name="x").fill("[0.5, 3, 0.25, 0]")
        page.get_by_role("button", name="Ask").press("Enter")
        expect(page.get_by_role("status")).to_contain_text("Answered by net@")
        page.get_by_label("Make version").select_option("2")
        # The registry names the new version before the browser has loaded the answer, so the page is awaited, not read.
        with page.expect_navigation(url=f"http://{address}/models/net"):
            page.get_by_role("button", name="active").press("Enter")
        assert roster.active("net") == "2"
        expect(page.get_by_role("button", name="Copy the text below")).to_have_count(2 if script else 0)


def test_a_browser_asks_its_user_for_the_key_and_sends_it(
    browser: Any, versions: Versions, store: Store
) -> None:
    store.promote(publish(store, of=spec(name="otter")))
    key, _ = KeyFile(store.root / "keys.json").add("mine", ["infer", "manage"], ["net"])
    given = {"username": "me", "password": key}
    with serving(store) as (address, roster), opened(browser, http_credentials=given) as page:
        page.goto(f"http://{address}/")
        assert "net" in page.inner_text("main") and "otter" not in page.inner_text("main")
        page.goto(f"http://{address}/models/net")
        page.get_by_role("button", name="active").click()
        until(lambda: roster.active("net") != "1")
