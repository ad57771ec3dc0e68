"""The reference pages, made from the code: ``make reference`` writes them, `test_reference.py` finds stale ones."""

import ast
import asyncio
import importlib
import json
import re
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import halfeven
import httpx
import typer
from halfeven.models import errors
from halfeven.models.folder.model_keys import TOP, Key, Keys
from halfeven.models.store.store import Store
from halfeven.serve import server
from halfeven.serve.cli.main import app
from halfeven.serve.dashboard.routes import documented_routes
from halfeven.serve.http.error_mapping import EXIT_CODES, exit_code_of, grpc_status_of, status_of
from halfeven.serve.http.route_scopes import rule_of
from halfeven.serve.settings import Settings, read_settings

from tests.house_sources import ROOT, nodes_with
from tests.reference.model_schema import SCHEMA_ID, model_schema

COMMAND_LINE = typer.main.get_command(app)
MADE = "This page is made from the code: `make reference`."
_SAID_OF_NO_CLASS = {
    "internal_error": (
        BaseException(),
        "A fault of halfeven itself: the server's log has the traceback. Please report it.",
    )
}


def cell(text: object) -> str:
    return " ".join(("" if text is None else str(text)).split()).replace("|", "\\|").replace("<", "&lt;")


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *([cell(one) for one in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# The command line


def commands() -> dict[str, tuple[str, Any]]:
    """(the group in ``--help``, the command) by its words."""
    found: dict[str, tuple[str, Any]] = {}
    for name, command in COMMAND_LINE.commands.items():  # type: ignore[attr-defined]
        for more, one in getattr(command, "commands", {"": command}).items():
            found[f"{name} {more}".strip()] = (command.rich_help_panel, one)
    groups = list(dict.fromkeys(panel for panel, _ in found.values()))
    return dict(sorted(found.items(), key=lambda item: groups.index(item[1][0])))


def _options(command: Any) -> Iterator[list[str]]:
    for param in command.params:
        if getattr(param, "hidden", False) or param.name in ("as_json", "help"):
            continue
        named = ", ".join(f"`{one}`" for one in (*param.opts, *param.secondary_opts) if one.startswith("-"))
        variable = f" [{param.envvar}]" if getattr(param, "envvar", None) else ""
        shown = (
            param.default not in (None, ())
            and not isinstance(param.default, bool)  # 1 == True
            and not callable(param.default)
            and not param.required
        )
        default = f" (default `{param.default}`)" if shown else " (needed)" if param.required else ""
        yield [named or f"`{param.metavar or param.name.upper()}`", f"{cell(param.help)}{variable}{default}"]


def command_line() -> str:
    parts = [
        "# The command line\n",
        "Every command takes `--help`; with `--json` the last line on stdout is one JSON object (not after Ctrl-C), "
        "while logs and progress "
        "go to stderr. The options of `serve` are settings too, by the variable in brackets; all of them are in "
        f"[environment.md](reference/environment.md). {MADE}\n",
        table(["exit code", "means"], EXIT_CODES.items()),
    ]
    group = ""
    for name, (panel, command) in commands().items():
        if panel != group:
            group = panel
            parts.append(f"## {panel}\n")
        parts.append(f"### halfeven {name}\n\n{cell(command.help)}\n")
        if rows := list(_options(command)):
            parts.append(table(["argument or option", ""], rows))
    return "\n".join(parts)


# model.toml


def model_toml() -> str:
    parts = [
        "# model.toml\n",
        f"Every key, from the table that its readers take. {MADE} The same as a JSON Schema, for an editor's help: "
        f"[model-toml.schema.json](model-toml.schema.json) (`$id`: `{SCHEMA_ID}`), which is in the package too, as "
        "`halfeven/models/model-toml.schema.json`. How to use them: [files](../files.md), "
        "[precision and parity](../precision.md), [batching](../batching.md), [pictures](../predict.md), "
        "[training](../finetune.md).\n",
        *_sections("", TOP, set()),
    ]
    return "\n".join(parts)


def _sections(place: str, keys: Keys, seen: set[str]) -> Iterator[str]:
    if place:
        yield f"## {place}\n"
    rows = (
        [f"`{name}`", _kind(key), _default(key), key.meaning, _example(name, key)]
        for name, key in keys.items()
    )
    yield table(["key", "type", "default", "what it does", "example"], rows)
    for name, key in keys.items():
        inside = f"{place.strip('[]`')}.{name}".strip(".") + (".NAME" if key.named else "")
        if key.keys is not None and name not in seen:
            seen.add(name)
            title = f"`[[{inside}]]`" if key.kind is list else f"`[{inside}]`"
            yield from _sections(title, key.keys, seen)


def _kind(key: Key) -> str:
    if key.one_of:
        return " or ".join(f"`{word}`" for word in key.one_of)
    words = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        list: "list",
        dict: "table",
    }
    if key.keys is not None and key.kind is list:
        return "tables"
    ends = [f"{word} {end:g}" for word, end in (("from", key.least), ("to", key.most)) if end is not None]
    also = f" or `{key.also['const']}`" if key.also is not None else ""
    return " ".join([words[key.kind] + also, *ends])


def _default(key: Key) -> str:
    if key.needed:
        return "needed"
    return "" if key.default in (None, "", []) else f"`{json.dumps(key.default)}`"


def _example(name: str, key: Key) -> str:
    return f"`{name} = {key.example}`" if key.example else ""


def schema() -> str:
    return json.dumps(model_schema(), indent=1, ensure_ascii=False) + "\n"


# Settings


def environment() -> str:
    options = {param.name: param for param in commands()["serve"][1].params}
    rows = []
    for name, field in Settings.model_fields.items():
        option = "" if field.description else f"`serve {options[name].opts[0]}`"
        text = field.description or re.sub(
            r"(; default [^;.]*)?\.? \[HALFEVEN_\w+\]$", "", options[name].help
        )
        text = text.replace("Repeatable", "Several: separated by commas")
        rows.append(
            [
                f"`HALFEVEN_{name.upper()}`",
                _setting_kind(field),
                _setting_default(field.default),
                text,
                option,
            ]
        )
    rows.append(
        [
            "`HALFEVEN_API_KEY`",
            "text",
            "",
            "the key that client commands and `Client` send",
            "`--key`, `--key-file`",
        ]
    )
    return "\n".join(
        [
            "# Settings and environment variables\n",
            "Every setting of a server. An option wins over the variable, the variable over the default; a misspelt "
            f"variable is named in the server's log. {MADE}\n",
            table(["variable", "type", "default", "what it sets", "option"], rows),
            "Variables of others that halfeven reads: `OTEL_…` ([traces](../observability.md)), "
            "`XDG_CACHE_HOME` (state "
            "beside a store that is only read), `RAY_ADDRESS` ([Ray](../ray.md)), `ONEDNN_MAX_CPU_ISA`, "
            "`CUDA_VISIBLE_DEVICES`. `HF_HUB_OFFLINE` and what switches telemetry of libraries off are set by "
            "halfeven itself. Commands take variables that make oneDNN compute FP32 in a less precise type "
            "(`ONEDNN_DEFAULT_FPMATH_MODE`, `DNNL_DEFAULT_FPMATH_MODE`) or bind threads to processors "
            "(`OMP_PROC_BIND`, `OMP_PLACES`, `GOMP_CPU_AFFINITY`, `KMP_AFFINITY`) out of their process, with a "
            "warning; the Python API refuses the first and warns of the second.\n",
        ]
    )  # fmt: skip


def _setting_kind(field: Any) -> str:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not types.NoneType]
    if get_origin(field.annotation) is Literal:
        return " or ".join(f"`{word}`" for word in kinds)
    words = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}
    ends = [
        f"{text} {getattr(one, name)}"
        for one in field.metadata
        for name, text in (("ge", "from"), ("gt", "above"), ("le", "to"))
        if hasattr(one, name)
    ]
    return " ".join([words[kinds[0]], *ends])


def _setting_default(value: object) -> str:
    return (
        ""
        if value is None or value == ""
        else f"`{value:g}`"
        if isinstance(value, float)
        else f"`{value}`".lower()
    )


# The pages that are made of a running server


class Running:
    """A server without models, for its OpenAPI document and the families of its metrics."""

    def __init__(self) -> None:
        registries: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder))
            with patch.object(server, "metrics_text", lambda registry: registries.append(registry) or b""):
                front, _ = server.build(read_settings(store=store.root), store)
                self.document, _ = asyncio.run(self._asked(front, "/openapi.json", "/metrics"))
        self.families = list(registries[0].collect())

    async def _asked(self, front: Any, *paths: str) -> list[Any]:
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            answers = [await client.get(path) for path in paths]
        return [answer.json() if "json" in answer.headers["content-type"] else None for answer in answers]


def metric_names(running: Running) -> dict[str, Any]:
    """The families by the names that Prometheus reads."""
    names = {}
    for family in running.families:
        ours = family.type == "counter" and not family.name.startswith("nv_")
        names[f"{family.name}_total" if ours else family.name] = family
    return names


def metrics(running: Running) -> str:
    rows = [
        [f"`{name}`", family.type, ", ".join(family._labelnames), family.documentation]
        for name, family in metric_names(running).items()
    ]
    return "\n".join(
        [
            "# Metrics\n",
            f"What `/metrics` has, with the labels of each. Of a histogram NAME there are `NAME_bucket`, "
            f"`NAME_sum` and "
            "`NAME_count`. Names that begin with `nv_` are Triton's. What they are for: "
            f"[a running server](../observability.md). {MADE}\n",
            table(["metric", "type", "labels", "what it counts"], rows),
        ]
    )


def http(running: Running) -> str:
    groups = documented_routes(running.document, "http://localhost:8000", needs_key=False)
    parts = [
        "# HTTP and gRPC\n",
        "Every operation, as a server shows it at `/docs` with more words; `/openapi.json` is the "
        "document for programs. "
        "`scope` is what a key needs, where there are keys ([security](../security.md)); `-` needs none. Errors are in "
        f"[errors](errors.md). {MADE}\n",
    ]
    for group, operations in groups.items():
        parts.append(f"## {group}\n")
        for one in operations:
            rule = rule_of(one["method"], one["path"])
            assert rule is not None, one
            scopes = " or ".join(sorted(rule[0].scopes)) or "-"
            parts.append(f"### {one['method']} {one['path']}\n\n{cell(one['sentence'])} Scope: {scopes}.\n")
            fields = [[f"`{p['name']}`", p["place"], p["type"], p["text"]] for p in one["parameters"]]
            for body in one["bodies"]:
                fields += [[f"`{f['name']}`", body["kind"], f["type"], f["text"]] for f in body["fields"]]
            if fields:
                parts.append(table(["parameter or field", "in", "type", ""], fields))
            parts.append(f"```\n{one['curl']}\n```\n")
    proto = (ROOT / "serve/grpc/open_inference.proto").read_text()
    calls = ", ".join(f"`{name}`" for name in re.findall(r"rpc (\w+)\(", proto))
    parts.append(
        f"## gRPC\n\n`inference.GRPCInferenceService` has {calls}; `grpc.health.v1.Health` has `Check` and `Watch`; "
        "reflection lists them. What each does is in [protocol](../protocol.md).\n"
    )
    return "\n".join(parts)


# Errors


@cache
def error_classes() -> dict[str, type[errors.HalfevenError]]:
    """Every class with a code of its own, by the code, in the order of the files."""
    found: dict[str, type[errors.HalfevenError]] = {}
    for file, node in nodes_with("    code = "):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(one).startswith("code = ") for one in node.body
        ):
            module = ".".join(("halfeven", *file.relative_to(ROOT).with_suffix("").parts))
            kind = getattr(importlib.import_module(module), node.name)
            if isinstance(kind, type) and issubclass(kind, errors.HalfevenError):
                assert kind.code not in found, f"two classes have the code {kind.code}"
                found[kind.code] = kind
    return found


def said_of(kind: type[errors.HalfevenError]) -> str:
    """The meaning of the error and its remedy: the first paragraph of the class."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def job_codes() -> dict[str, str]:
    """The codes of jobs that ended badly, each with the beginning of its message where it is written beside it."""
    found: dict[str, str] = {}
    for file in sorted((ROOT / "serve/finetune").rglob("*.py")):
        tree = ast.parse(file.read_text())
        names = {
            target.id: value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(value := node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or len(node.args) < 2:
                continue
            if getattr(node.func, "id", "") in ("Stopped", "JobFailed", "WorkerLost"):
                code = node.args[0]
                word = code.value if isinstance(code, ast.Constant) else names.get(ast.unparse(code))
                if isinstance(word, str) and found.get(word, "…").startswith("…"):
                    found[word] = _words(node.args[1])
    return dict(sorted(found.items()))


def _words(node: ast.expr) -> str:
    """A message as it is written, … for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
    return ""


def errors_page() -> str:
    kinds = {
        **{code: (kind.__new__(kind), said_of(kind)) for code, kind in error_classes().items()},
        **_SAID_OF_NO_CLASS,
    }
    rows = []
    for code, (error, _) in kinds.items():
        status = status_of(error)
        rows.append([f"[`{code}`](#{code})", status, grpc_status_of(error), exit_code_of(error)])
    parts = [
        "# Errors\n",
        "An error has a code, which stays, and a message, which says what was wrong, what was expected, "
        "what came and what "
        'to do. Over HTTP it is `application/problem+json` with `code`, and `{"error": …}` on `/v2`; in Python it is a '
        "class of `halfeven.models.errors`; the command line prints the message and exits with a "
        f"[code of its own](../commands.md). {MADE}\n",
        table(["code", "HTTP", "gRPC", "exit"], rows),
        f"`{HTTPStatus(405).phrase}` (405) and the like are those of HTTP itself. With `--triton-strict` some statuses "
        "differ ([protocol](../protocol.md)).\n",
        "## What each means, and what to do\n",
        "By the words that you read: [messages](messages.md).\n",
    ]
    for code, (_, said) in kinds.items():
        parts.append(f"### {code}\n\n{said}\n")
    parts += [
        "## Codes of jobs\n",
        "A fine-tuning job that ends badly has one of these in its `error`. Its message begins like this "
        "and goes on with "
        "what to do ([fine-tuning](../finetune.md)).\n",
        table(["code", "message"], ([f"`{code}`", said] for code, said in job_codes().items())),
    ]
    return "\n".join(parts)  # fmt: skip


@cache
def messages() -> str:
    """Every message whose text stands where its error is raised, … for what is put in."""
    codes = {kind.__name__: code for code, kind in error_classes().items()}
    codes["self.error"] = codes["BadFolder"]  # of the readers of a folder
    codes["error"] = codes["BadRequest"]  # a parameter of what reads requests and files alike, by its default
    found: dict[str, str] = {}
    for _, node in nodes_with(*(f"{name}(" for name in codes)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if getattr(node.func, "attr", getattr(node.func, "id", "")) in codes:
            name = ast.unparse(node.func)
            if name not in codes and not name.endswith(".error"):  # a line of the log
                name = name.rpartition(".")[2]
            text = _words(node.args[0])
            if name in codes and len(re.findall(r"[a-z]{2,}", text)) > 4:
                said = " ".join(text.split())
                found[said] = found.get(said, codes[name]) if name == "error" else codes[name]
    rows = ([said, f"[`{code}`](errors.md#{code})"] for said, code in sorted(found.items(), key=_by_text))
    return "\n".join(
        [
            "# Messages\n",
            "Look for the words that you read; … stands for names and numbers. A message says itself what "
            "to do; its code "
            f"says what kind it is. {MADE}\n",
            table(["message", "code"], rows),
        ]
    )


def _by_text(item: tuple[str, str]) -> str:
    return item[0].strip("…:. '").lower()


# Python


def python_api() -> str:
    parts = [
        "# The Python API\n",
        f"Every name of `halfeven`; how to use them: [from Python](../python.md). {MADE}\n",
    ]
    for name in sorted(set(halfeven.__all__) - {"__version__"}, key=str.lower):
        place = halfeven._PLACES.get(name, "halfeven.serve.python_api.serving")
        file = ROOT.joinpath(*place.split(".")[1:]).with_suffix(".py")
        node = next(
            one
            for one in ast.parse(file.read_text()).body
            if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name
        )
        parts.append(f"## {name}\n")
        parts += _described(f"halfeven.{name}", node)
    return "\n".join(parts)


def _described(name: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if not isinstance(node, ast.ClassDef):
        yield f"```\n{_signature(name, node)}\n```\n\n{_plain(node)}\n"
        return
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    made = next((one for one in methods if one.name == "__init__"), None)
    if made is not None:
        yield f"```\n{_signature(name, made)}\n```\n"
    yield f"{_plain(node)}\n"
    for one in methods:
        if not one.name.startswith("_") or one.name == "__call__":
            shown = name.rpartition(".")[2].lower() + ("" if one.name == "__call__" else f".{one.name}")
            is_value = any(ast.unparse(mark) == "property" for mark in one.decorator_list)
            head = (
                f"{shown}: {ast.unparse(one.returns)}" if is_value and one.returns else _signature(shown, one)
            )
            yield f"`{head}`\n\n{_plain(one)}\n"


def _signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    awaited = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    gives = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"{awaited}{name}({arguments}){gives}".replace("'", '"')


def _plain(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return (ast.get_docstring(node) or "").replace("``", "`")


def pages() -> dict[str, Callable[[], str]]:
    """The function that makes each file, by the file's place in the checkout."""
    running = Running()
    return {
        "docs/commands.md": command_line,
        "docs/reference/model-toml.md": model_toml,
        "docs/reference/model-toml.schema.json": schema,
        "models/model-toml.schema.json": lambda: json.dumps(model_schema(), ensure_ascii=False) + "\n",
        "docs/reference/environment.md": environment,
        "docs/reference/metrics.md": lambda: metrics(running),
        "docs/reference/http.md": lambda: http(running),
        "docs/reference/errors.md": errors_page,
        "docs/reference/messages.md": messages,
        "docs/reference/python-api.md": python_api,
    }


if __name__ == "__main__":
    for place, made in pages().items():
        text = made()
        if (ROOT / place).read_text() != text if (ROOT / place).is_file() else True:
            (ROOT / place).write_text(text)
            print(f"written: {place}")
