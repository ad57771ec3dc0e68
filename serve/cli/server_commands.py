"""The commands that ask or order a running server over HTTP."""

import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Any

import orjson
import typer
from rich.console import Group
from rich.text import Text

from ...models.errors import BadInput, CannotServe
from ..access.direct_requests import ask, json_of, model_path
from .console import LOCAL, Ended, Url, command, listing
from .store_commands import version_named

_JOBS = "/v1/fine_tuning/jobs"
_MANY = 1000  # the most that the server lists at once
NameOf = Annotated[str, typer.Argument(help="The model.")]
Target = Annotated[str, typer.Argument(help="NAME@VERSION; NAME alone ends the canary or shadow.")]
Percent = Annotated[float | None, typer.Argument(help="The share in percent, above 0 to 100.")]


def _asked(url: str, path: str, order: Mapping[str, Any] | None = None) -> Any:
    """The JSON of the answer to a GET, or to a POST of the order. None for an empty body. Raises as `ask`."""
    body = None if order is None else orjson.dumps(order)
    _, answer = ask(url.rstrip("/") + path, body, "application/json", "application/json", timeout_s=600.0)
    return json_of(url, answer) if answer else None


@command
def status(url: Url = LOCAL) -> Ended:
    """Show what a running server serves: versions, precisions and why, shares of the traffic, requests and errors.
    The exit code is 1 where it is not ready."""
    server, waiting = _asked(url, "/v2"), _not_ready(url)
    names = dict.fromkeys(entry["name"] for entry in _asked(url, "/v2/repository/index", {}))
    models = {name: _asked(url, model_path(name, "v1")) for name in names}
    counted = {
        (one["name"], one["version"]): one["inference_stats"]
        for one in _asked(url, "/v2/models/stats")["model_stats"]
    }
    for name, model in models.items():
        for version in model["loaded"]:
            found = counted.get((name, str(version["version"])), {})
            version["requests"] = found.get("success", {}).get("count", 0)
            version["errors"] = found.get("fail", {}).get("count", 0)
    facts = {"url": url, "server": server, "ready": not waiting, "not_ready": waiting, "models": models}
    return facts, _status_shown(facts), 1 if waiting else 0


def _not_ready(url: str) -> str:
    """The reason why a server that answers is not ready; empty where it is."""
    try:
        _asked(url, "/v2/health/ready")
    except (BadInput, CannotServe) as error:
        return str(error)
    return ""


def _status_shown(facts: Mapping[str, Any]) -> Group:
    server = facts["server"]
    table = listing("model", "version", "is", "share", "served in", "requests", "errors")
    lines = [f"{server['name']} {server['version']} at {facts['url']}: {facts['not_ready'] or 'ready'}"]
    for name, model in facts["models"].items():
        for one in model["loaded"]:
            cells = (name, one["version"], one["label"], f"{one['percent']:g} %", one["precision"])
            table.add_row(*(Text(str(cell)) for cell in (*cells, one["requests"], one["errors"])))
            lines.append(f"{name}@{one['version']} is served in {one['precision']}: {one['reason']}")
        if model.get("fault") or not model["loaded"]:
            lines.append(f"{name}: {model.get('fault') or 'not loaded'}")
    return Group(*([table] if table.rows else []), *map(Text, lines))


@command
def canary(
    target: Target,
    percent: Percent = None,
    url: Url = LOCAL,
) -> Ended:
    """Give a version a share of the requests: `canary NAME@2 10`. `canary NAME` ends it."""
    return _share("canary", target, percent, url)


@command
def shadow(
    target: Target,
    percent: Percent = None,
    url: Url = LOCAL,
) -> Ended:
    """Put a share of the answered requests to a version too, and compare: `shadow NAME@2 10`. `shadow NAME` ends it."""
    return _share("shadow", target, percent, url)


def _share(role: str, target: str, percent: float | None, url: str) -> Ended:
    name, number = version_named(target) if "@" in target else (target, None)
    if (number is None) != (percent is None):
        raise BadInput(
            f"expected `halfeven {role} NAME@VERSION PERCENT`, or `halfeven {role} NAME` to end it; got {target!r} "
            + ("without PERCENT" if percent is None else f"with {percent:g} %")
        )
    order = {} if number is None else {"version": number, "percent": percent}
    facts = _asked(url, f"{model_path(name, 'v1')}/{role}", order)
    done = f"the {role} of {name} has ended" if number is None else f"{target} is the {role}: {percent:g} %"
    return facts, done, 0


@command
def unload(
    name: NameOf,
    url: Url = LOCAL,
) -> Ended:
    """Take a model out of a running server's memory; what was accepted is answered. `load` brings it back."""
    return _repository(name, "unload", url)


@command
def load(
    name: NameOf,
    url: Url = LOCAL,
) -> Ended:
    """Load a model's active version into a running server; the command ends when it serves."""
    return _repository(name, "load", url)


def _repository(name: str, verb: str, url: str) -> Ended:
    _asked(url, f"/v2/repository/models/{urllib.parse.quote(name, safe='')}/{verb}", {})
    return {"model": name, "status": f"{verb}ed"}, f"{name} is {verb}ed", 0


@command
def jobs(
    limit: Annotated[int, typer.Option(min=1, max=_MANY, help="How many, the newest first.")] = 20,
    url: Url = LOCAL,
) -> Ended:
    """List the fine-tuning jobs of a running server, the newest first."""
    found = _asked(url, f"{_JOBS}?limit={limit}")
    table = listing("job", "model", "status", "is", whole="job")
    for job in found["data"]:
        table.add_row(*map(Text, (job["id"], job["model"], job["status"], _outcome(job))))
    none = "no fine-tuning job yet; `halfeven finetune NAME --data FILE` begins one"
    return {"jobs": found["data"], "has_more": found["has_more"]}, table if found["data"] else none, 0


def _outcome(job: Mapping[str, Any]) -> str:
    from ..finetune.client.job_command import described

    if error := (job.get("error") or {}).get("message"):
        return str(error)
    if made := job.get("fine_tuned_model"):
        promotion = (job.get("halfeven") or {}).get("promotion") or {}
        return f"{made}: {promotion.get('state', 'published')}"
    stage, numbers, _, _ = described(job)
    return f"{stage}: {numbers}" if numbers else stage


@command
def cancel(
    job: Annotated[str, typer.Argument(help="The identifier of a fine-tuning job, ftjob-….")],
    url: Url = LOCAL,
) -> Ended:
    """End a fine-tuning job after its current step; what serves is unchanged."""
    found = _asked(url, f"{_JOBS}/{urllib.parse.quote(job, safe='')}/cancel", {})
    return found, f"job {job}: {found['status']}", 0
