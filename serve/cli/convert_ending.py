"""The end of `halfeven convert`: what a server on this machine will serve and why, the report, and the next command."""

from pathlib import Path

from ...exporters.guessing.bare import TOML
from ...models.engines.device_choice import resolve_device
from ...models.machine.processor import this_processor
from ...models.store.store import Store, Version
from ..versions.loading.candidate_forms import HALF_MUST_GAIN
from .console import DEFAULT_STORE


def ending(version: Version, store: Store, model: Path, given: Path, report: Path | None) -> list[str]:
    """The three closing lines. ``model``: what was converted; ``given``: the store as the caller named it;
    ``report``: the path of the page, where the caller asked for one."""
    place = model.parent if model.is_file() else model
    toml = "model.toml" if (place / TOML).is_file() else f"the model.toml that `halfeven init {model}` writes"
    page = report or given / version.folder.relative_to(store.root) / "report.html"
    more = "" if given == DEFAULT_STORE else f" --store {given}"
    return [
        f"served here: {_served(version, store.live_number(version.name), toml)}",
        f"report: {page}",
        f"next: halfeven serve{more}",
    ]


def _served(version: Version, live: int | None, toml: str) -> str:
    if live not in (None, version.number):
        return f"version {live}, which stays active; this one is {version.status}"
    half = version.manifest["half"]
    if live is None:
        return "the FP32 original, because no half is proven equal; --keep NODE keeps more in FP32"
    if half is None:
        return "FP32, because nothing is half (the reason is above)"
    name, form = half.upper(), version.spec().form
    passed = [one for one, facts in version.manifest["forms"].items() if facts["passed"]]
    if form in passed:
        return f'the proven {name} half, because form = "{form}" asks for it'
    any_case = f'; form = "{passed[0]}" in {toml} serves the half in any case'
    measured = f"if a server measures it {HALF_MUST_GAIN:g} times as fast when it first loads it"
    units = this_processor().units()
    if resolve_device("auto").type == "cpu" and half not in units:
        instead = f", but {units[0].upper()} (--dtype {units[0]})" if units else ""
        return f"probably FP32: this CPU does not multiply {name} itself{instead}. The half serves {measured}{any_case}"
    return f"the {name} half {measured}, else FP32{any_case}"
