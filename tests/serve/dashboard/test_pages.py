"""The web pages: what they say, to whom, what their forms order, and that no other page may send them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from halfeven.models.store.store import REFUSED, Store
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.http.page_headers import OWN_PAGE, POLICY
from halfeven.serve.versions.orders import record
from halfeven.serve.versions.roster import Roster

from tests.patience import until
from tests.serve.dashboard.conftest import Tags, browse, busy, typed
from tests.serve.versions.traffic.conftest import Versions, call, infer, publish, serving, spec

ORDERS = ("promote", "rollback", "canary", "shadow")
HOSTILE = "<script>alert('ü')</script>\"'&"


@pytest.fixture
def served(versions: Versions, store: Store) -> Iterator[tuple[str, Roster]]:
    """``net`` with versions 1 (active) to 3 and a refused one, and another model."""
    publish(store, REFUSED)
    store.promote(publish(store, of=spec(name="otter")))
    with serving(store, watch_faults=1000) as running:
        yield running


@pytest.mark.slow
def test_home_has_a_card_for_each_model_and_says_how_the_server_is(served: tuple[str, Roster]) -> None:
    page = Tags(browse(served[0], "/").text)
    said = page.text
    for words in ("net @1 fp16", "torch on cpu: made up", "otter @1", "ready", "keys off", "free of", "0.0"):
        assert words in said, words
    links = {"./models/net", "./models/net#versions", "./models/net#drift", "./models/net#try"}
    assert links | {"./events?model=net", "./v1/models/net/versions/1/report"} <= page.links()


@pytest.mark.slow
def test_an_empty_store_says_how_a_model_comes_into_it(versions: Versions, tmp_path: Path) -> None:
    with serving(Store(tmp_path / "empty")) as (address, _):
        said = browse(address, "/").text
    assert "The store is empty" in said and "halfeven convert" in said


@pytest.mark.slow
def test_a_model_that_cannot_serve_is_on_the_pages_with_its_reason(versions: Versions, store: Store) -> None:
    from halfeven.models.errors import EngineFailed

    versions.refuse[1] = EngineFailed("the device has too little memory")
    with serving(store) as (address, _):
        for path in ("/", "/models/net"):
            said = browse(address, path)
            assert said.status == 200 and "too little memory" in said.text
        assert "not ready" in browse(address, "/").text


@pytest.mark.slow
@pytest.mark.parametrize("below", ["", "/team/models"])
def test_no_link_of_any_page_is_dead_or_leads_elsewhere(versions: Versions, store: Store, below: str) -> None:
    """Beginning at home, through every page that is reached; behind a proxy that shows the server below a path too."""
    store.promote(publish(store, of=spec(name="otter")))
    asked, dead = set[str](), []
    waiting = [below or "/", f"{below}/v1/fine_tuning/jobs/nothing/page"]
    with serving(store, root_path=below) as (address, _):
        while waiting:
            path = urlsplit(waiting.pop())._replace(fragment="").geturl()
            if path in asked:
                continue
            asked.add(path)
            shown = browse(address, path.removeprefix(below) or "/")
            # Published without a report.
            if shown.status != 200 and "nothing" not in path and "/report" not in path:
                dead.append((path, shown.status))
            if "html" in shown.headers["content-type"]:
                waiting += [urljoin(path, link) for link in Tags(shown.text).links()]
    assert dead == [] and all(path.startswith(below) for path in asked)
    pages = ("/", "/models/net", "/models/otter", "/events", "/jobs", "/docs", "/openapi.json")
    assert {f"{below}{page}" for page in pages} <= asked


def test_pages_may_run_our_script_and_send_forms_here_and_nothing_else_may(
    served: tuple[str, Roster],
) -> None:
    address = served[0]
    for path in ("/", "/models/net", "/events", "/jobs", "/docs"):
        shown = browse(address, path)
        assert shown.headers.get_all("content-security-policy") == [OWN_PAGE], path
        tags = Tags(shown.text).tags
        assert {str(more["src"]).rpartition("/")[2] for tag, more in tags if tag == "script"} <= {"page.js"}
        assert any(tag == "meta" and more.get("name") == "viewport" for tag, more in tags)
        assert not any(name.startswith("on") for _, more in tags for name in more)
    assert "script-src 'self'" in OWN_PAGE and "script-src" not in POLICY
    for path in ("/v1/models/net/versions/1/report", "/v1/models", "/page.js", "/nothing"):
        assert browse(address, path).headers.get_all("content-security-policy") == [POLICY], path


@pytest.mark.slow
def test_the_forms_give_the_orders_and_lead_back_to_the_page(served: tuple[str, Roster]) -> None:
    address, roster = served
    net = roster.served("net")
    assert net is not None

    def shares() -> dict[str, int]:
        return {label: loaded.number for loaded, label in net.traffic.loaded_versions().items()}

    for order, form, expected in (
        ("canary", {"version": "2", "percent": "12.5"}, {"stable": 1, "canary": 2}),
        ("shadow", {"version": "3", "percent": "50"}, {"stable": 1, "canary": 2, "shadow": 3}),
        ("canary", {"end": "1"}, {"stable": 1, "shadow": 3}),
        ("shadow", {"end": "1"}, {"stable": 1}),
        ("promote", {"version": "2"}, {"stable": 2, "previous": 1}),
        ("rollback", {}, {"stable": 1, "previous": 2}),
    ):
        shown = browse(address, f"/models/net/{order}", form)
        assert (shown.status, shown.headers["location"]) == (303, "../net"), order
        assert shares() == expected
        if order == "canary" and "version" in form:
            page = browse(address, "/models/net").text
            assert "12.5 percent" in page and "End the canary" in page
    assert "1 was promoted" not in browse(address, "/events").text
    assert "net@2 was promoted" in browse(address, "/events?model=net").text


@pytest.mark.parametrize(
    ("order", "form", "status", "words"),
    [
        ("promote", {"version": "4"}, 409, "refused by the parity gate"),
        ("promote", {"version": "x"}, 400, "expected a version"),
        ("promote", {"version": "9"}, 404, "net"),
        ("promote?order=rollback", {"version": "9"}, 404, "has no version 9"),
        ("canary", {"version": "2", "percent": "lots"}, 400, "from 0 to 100"),
        ("canary", {"version": "2", "percent": "nan"}, 400, "from 0"),
        ("canary", {"version": "1", "percent": "5"}, 400, "is active"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_a_page_with_the_reason(
    served: tuple[str, Roster], order: str, form: dict[str, str], status: int, words: str
) -> None:
    shown = browse(served[0], f"/models/net/{order}", form)
    assert shown.status == status and shown.headers["content-type"].startswith("text/html")
    assert words in Tags(shown.text).text and "../../" in Tags(shown.text).links()


@pytest.mark.slow
@pytest.mark.parametrize("origins", ["", "*"])
@pytest.mark.parametrize(
    "said",
    [
        {"origin": "", "sec-fetch-site": ""},  # an old browser, or a program
        {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
        {"origin": "http://evil.example", "sec-fetch-site": ""},
        {"origin": "null", "sec-fetch-site": ""},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
    ],
    ids=lambda said: "/".join(f"{value}" for value in said.values()),
)
def test_a_form_of_another_page_orders_nothing_also_where_its_origin_may_read(
    versions: Versions, store: Store, said: dict[str, str], origins: str
) -> None:
    with serving(store, cors_origins=origins) as (address, roster):
        for order in (*ORDERS, "try"):
            status, _, text = browse(
                address, f"/models/net/{order}", {"version": "2", "percent": "9"}, **said
            )
            assert status == 403 and "foreign_origin" in text, order
        net = roster.served("net")
        assert net is not None and list(net.traffic.loaded_versions().values()) == ["stable"]
        assert (
            browse(address, "/models/net/promote", {"version": "2"}, **{"sec-fetch-site": ""}).status == 303
        )


def test_a_request_is_tried_on_the_page_and_a_refusal_is_told_there(served: tuple[str, Roster]) -> None:
    address = served[0]
    body, kind = typed(b"[0.25, 1, 0.5, -2]")
    shown = browse(address, "/models/net/try", body, **{"content-type": kind})
    said = Tags(shown.text).text
    assert shown.status == 200 and "Answered by net@1 in fp16" in said
    assert "class value 1 1 2 0.5 0 0.25 3 -2" in said  # the best first
    for wrong, words in (
        (b"[1, 2]", "expected shape"),
        (b"", "is empty"),
        (b"{", "not JSON"),
        (b"[[1]]", "shape"),
    ):
        shown = browse(address, "/models/net/try", typed(wrong)[0], **{"content-type": kind})
        assert shown.status == 400 and words in Tags(shown.text).text, wrong
    assert browse(address, "/models/nobody/try", body, **{"content-type": kind}).status == 404


@pytest.mark.slow
def test_each_key_is_shown_its_models_and_offered_what_it_may_do(versions: Versions, store: Store) -> None:
    store.promote(publish(store, of=spec(name="otter")))
    file = KeyFile(store.root / "keys.json")
    infers, trains, manages = (file.add(scope, [scope], ["net"])[0] for scope in ("infer", "train", "manage"))
    scrapes, _ = file.add("metrics", ["metrics"])
    with serving(store) as (address, _):
        for key, may, may_not in (
            (infers, ["Try it", "curl", "HALFEVEN_API_KEY"], ["Versions", "Change what serves", "Drift"]),
            (trains, ["Versions", "Drift"], ["Try it", "Change what serves"]),
            (manages, ["Versions", "Change what serves"], ["Try it"]),
        ):
            home, page = browse(address, "/", key=key), browse(address, "/models/net", key=key)
            assert home.status == page.status == 200
            said = Tags(home.text).text
            assert "net @1" in said and "otter" not in home.text and "keys on" in said
            assert all(words in page.text for words in may)
            assert not any(f">{words}</h2>" in page.text for words in may_not)
            assert browse(address, "/models/otter", key=key).status == 403
            status = browse(address, "/events", key=key).status
            assert status == (403 if key == infers else 200)
        assert browse(address, "/models/net/promote", {"version": "2"}, key=infers).status == 403
        assert browse(address, "/models/net/promote", {"version": "2"}, key=manages).status == 303
        assert browse(address, "/", key=scrapes).status == 403
        assert browse(address, "/events?model=otter", key=manages).status == 403


@pytest.mark.slow
def test_a_browser_gets_errors_as_pages_and_programs_get_json(served: tuple[str, Roster]) -> None:
    address = served[0]
    for path, status in (
        ("/nothing", 404),
        ("/v1/models/nobody", 404),
        ("/v2/nothing", 404),
        ("/v2/models/x", 404),
    ):
        shown = browse(address, path)
        assert (shown.status, shown.headers["content-type"]) == (status, "text/html; charset=utf-8")
        links = Tags(shown.text).links()
        assert {urlsplit(urljoin(f"http://x{path}", link)).path for link in links} >= {"/"}
    for accept in (
        "",
        "*/*",
        "application/json",
        "application/json, text/plain, */*",
        "application/json, text/html",
    ):
        assert "json" in browse(address, "/nothing", accept=accept).headers["content-type"], accept
    java = "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2"
    assert browse(address, "/v2/models/x", accept=java).headers["content-type"] == "application/json"


def test_a_parameter_that_does_not_fit_is_named_without_our_code(served: tuple[str, Roster]) -> None:
    said = call(served[0], "/events?limit=many")[1]["detail"]
    assert said.startswith("query parameter limit = 'many': Input should be a valid integer"), said
    assert "routes.py" not in said


def test_a_browser_without_a_key_is_told_where_the_key_goes(versions: Versions, store: Store) -> None:
    KeyFile(store.root / "keys.json").add("one", ["infer"])
    with serving(store) as (address, _):
        shown = browse(address, "/models/net")
    assert (
        shown.status == 401
        and "give the key as the password" in shown.text
        and "net" not in Tags(shown.text).text
    )


@pytest.mark.slow
def test_what_is_stored_or_sent_is_text_on_every_page_and_never_markup(served: tuple[str, Roster]) -> None:
    address, roster = served
    record(roster.store, "net", "made_up", HOSTILE)
    net = roster.served("net")
    assert net is not None
    net.prepared.reason = HOSTILE
    pages = [browse(address, path).text for path in ("/", "/models/net", "/events", "/events?model=net")]
    body, kind = typed(HOSTILE.encode())
    pages.append(browse(address, "/models/net/try", body, **{"content-type": kind}).text)
    pages.append(browse(address, "/models/net/promote", {"version": HOSTILE}).text)
    pages.append(browse(address, f"/{HOSTILE.encode().hex()}").text)
    for page in pages:
        scripts = [more for tag, more in Tags(page).tags if tag == "script"]
        assert all(set(more) == {"src", "defer"} for more in scripts) and "alert('" not in page
    assert sum(HOSTILE in Tags(page).text for page in pages) >= 4


@pytest.mark.slow
def test_live_figures_come_from_the_counters_of_the_versions_that_answer(served: tuple[str, Roster]) -> None:
    address, roster = served
    for _ in range(7):
        infer(address)
    net = roster.served("net")
    assert net is not None
    net.recent._next_s = 0.0  # its bin is due
    until(lambda: sum(one.answered for one in net.recent.bins()) == 7)
    page = Tags(browse(address, "/models/net").text).text
    assert "p50 – p99 –" not in page and "requests/s" in page
    assert 'class="p99"' in browse(address, "/").text


@pytest.mark.slow
def test_fifty_models_are_less_than_300_kb_and_read_no_version_of_the_store(
    versions: Versions, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(49):
        store.promote(publish(store, of=spec(name=f"model-{number:02}")))
    with serving(store) as (address, roster):
        for one in roster.all():
            one.recent._bins.extend(busy(index) for index in range(60))
        monkeypatch.setattr(Store, "version", None)
        began, page = time.perf_counter(), browse(address, "/")
        times = [1e3 * (time.perf_counter() - began)]
        for _ in range(5):
            began = time.perf_counter()
            assert browse(address, "/").status == 200
            times.append(1e3 * (time.perf_counter() - began))
    assert page.status == 200 and page.text.count("<article") == 50
    assert len(page.text.encode()) < 300_000, len(page.text)
    print(
        f"50 models: {len(page.text.encode())} bytes, {times[0]:.0f} ms the first time, then {min(times):.0f} ms"
    )


def test_every_operation_of_the_document_is_on_the_docs_page_with_its_body_and_a_command(
    served: tuple[str, Roster],
) -> None:
    address = served[0]
    document: Any = call(address, "/openapi.json")[1]
    page = Tags(browse(address, "/docs").text).text
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            assert f"{method.upper()} {path}" in page, path
            content = one.get("requestBody", {}).get("content", {})
            if content:
                assert any("example" in kind for kind in content.values()), path
            for kind in content.values():
                if "example" in kind:
                    assert " ".join(json.dumps(kind["example"], indent=2).split()) in page, path
    assert page.count("curl ") == sum(len(methods) for methods in document["paths"].values())
    reads_bodies = {"/v1/files", "/v1/fine_tuning/jobs", "/v2/repository/index", "/v1/models/{m}:predict"}
    assert all("requestBody" in document["paths"][path]["post"] for path in reads_bodies)
