"""Two plain pages that load nothing: FastAPI's own /docs fetches its scripts from the internet, which many machines
with a GPU cannot reach. Links are relative: a proxy may show the server below a path.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.3rem .8rem .3rem 0;vertical-align:top}
td,th{border-bottom:1px solid #ddd}code{font:14px ui-monospace,monospace}h2{margin-top:2rem}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}a{color:#8bf}}
</style>"""


def front_page(models: Sequence[Mapping[str, str]]) -> str:
    """which version is active, and where to read on."""
    keys = ("name", "version", "precision", "form", "device", "reason")
    head = "".join(f"<th>{key}</th>" for key in keys)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(model[key])}</td>' for key in keys)}</tr>" for model in models
    )
    table = f"<table><tr>{head}</tr>{rows}</table>" if models else "<p>No model is active.</p>"
    links = "".join(
        f'<li><a href="{path}">/{path}</a> {what}</li>'
        for path, what in (
            ("docs", "every route"),
            ("v1/models", "models as JSON"),
            ("v2/health/ready", "readiness"),
            ("metrics", "Prometheus"),
        )
    )
    return _page("halfeven", f"<h1>halfeven</h1><p>Half precision, even answers.</p>{table}<ul>{links}</ul>")


def docs_page(openapi: Mapping[str, Any]) -> str:
    """Every route with its sentence, by group, from the OpenAPI document."""
    groups: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            sentence = route.get("description") or route.get("summary", "")
            groups.setdefault(route["tags"][0], []).append(
                f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(sentence)}</td></tr>"
            )
    sections = "".join(
        f"<h2>{escape(tag)}</h2><table>{''.join(rows)}</table>" for tag, rows in groups.items()
    )
    machine = '<p>For machines: <a href="openapi.json">/openapi.json</a></p>'
    return _page("halfeven: routes", f"<h1>Routes</h1>{machine}{sections}")


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>{_STYLE}</head>'
        f"<body>{body}</body></html>"
    )
