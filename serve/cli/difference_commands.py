"""The commands about other engines: ``diff`` compares two by their tensors, ``index-check`` by a search, ``export``
gives one the proven half, ``prove`` judges its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...models.errors import BadSetting
from .console import DEFAULT_STORE, Ended, Key, KeyFileOf, StoreAt, notify, order

if TYPE_CHECKING:
    from ...exporters.differing.first_difference import Side
    from ...models.store.store import Version
    from .v2_engine import V2Engine

Theirs = Annotated[
    str | None,
    typer.Argument(
        metavar="B",
        show_default=False,
        help="Another of these, the half of NAME@VERSION, or the URL of a V2 server.",
    ),
]
NodeFolder = Annotated[
    Path | None, typer.Option(help="A new folder for the node that differs, with its inputs.")
]
Visible = Annotated[
    Path | None,
    typer.Option(
        help="Compare nothing: write A, an ONNX file, as this file with its inner tensors as outputs, for a server."
    ),
]


@order
def diff(
    ours: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="What is right: an ONNX file, an exported program (.pt2), a model folder, model.py:build, or the "
            "original of NAME or NAME@VERSION.",
        ),
    ],
    theirs: Theirs = None,
    samples: Annotated[
        Path | None, typer.Option(help="npz or safetensors: inputs by name, axis 0 the samples.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What B is to compute in: fp32, fp16 or bf16; default: its own types, of a server fp32."
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Run B with the libraries of this python, from an environment that needs no halfeven."
        ),
    ] = None,
    out: NodeFolder = None,
    visible: Visible = None,
    key: Key = None,
    key_file: KeyFileOf = None,
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Run two engines of one model on the same samples; name the first tensor that differs by more than rounding."""
    from ...exporters.differing.diff import differences, side_of
    from ...exporters.differing.elsewhere import started_as
    from ...models.files.durable import check_new_folder

    if visible is not None:
        return _made_visible(
            _model(ours, store), visible, alone=not any((theirs, samples, dtype, python, out))
        )
    if theirs is None or samples is None:
        lacking = "B" if theirs is None else "--samples FILE"
        raise BadSetting(
            f"{lacking} is missing: expected halfeven diff A B --samples FILE, or halfeven diff A --visible FILE"
        )
    _check_named(theirs, dtype, python)
    if out is not None:
        check_new_folder("--out", out)
    model = _model(ours, store)
    a = side_of(model, samples)
    if "://" in theirs:
        b: Any = _server(theirs, model, a)
    else:
        b = side_of(_model(theirs, store), samples, half=True, python=started_as(python) if python else None)
    facts = differences(a, b, samples, dtype, out)
    return facts, _said(facts, "://" in theirs), 0 if facts["equal"] else 3


def _check_named(theirs: str, dtype: str | None, python: str | None) -> None:
    from ...exporters.differing.diff import DTYPES
    from ..access.direct_requests import is_server_url

    if dtype not in (None, *DTYPES):
        raise BadSetting(f"--dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if "://" in theirs and not (is_server_url(theirs) and theirs.isascii()):
        raise BadSetting(f"B {theirs[:80]!r}: expected http://HOST:PORT or http://HOST:PORT/v2/models/NAME")
    if "://" in theirs and python is not None:
        raise BadSetting(
            f"--python {python}: B is a server, which runs with its own libraries: give --python with a model as B"
        )


def _server(url: str, model: "Path | Version", a: "Side") -> "V2Engine":
    """The model at the URL as `differences` asks it. Samples of a file have the batch where the file has it."""
    from ...exporters.differing.diff import published_name
    from ...exporters.differing.onnx_side import OnnxSide
    from ..access.client_key import request_headers
    from .v2_engine import v2_engine

    engine = v2_engine(url, published_name(model, a), 60.0, request_headers(()))
    as_in_file = isinstance(model, Path) and isinstance(a, OnnxSide)
    return replace(engine, input_axes={}, output_axes={}) if as_in_file else engine


def _made_visible(model: "Path | Version", target: Path, alone: bool) -> Ended:
    if not alone:
        raise BadSetting(
            "--visible writes a file and compares nothing: expected halfeven diff A --visible FILE alone, and another "
            "command that compares"
        )
    from ...exporters.differing.onnx_side import OnnxSide
    from ...exporters.differing.visible_file import write_visible

    path = model if isinstance(model, Path) else model.folder / "original.onnx"
    if path.suffix != ".onnx" or not path.is_file():
        raise BadSetting(f"--visible: expected an ONNX file as A, or a version that has one, got {model}")
    names = write_visible(OnnxSide(path), target)
    said = f"{target}: {path.name} with {len(names)} inner tensors as outputs"
    return (
        {"visible": str(target), "tensors": names},
        f"{said}\nserve it, then: halfeven diff {path} URL --samples FILE",
        0,
    )


def _model(target: str, store: Path) -> "Path | Version":
    """A path, or a version of the store where there is none."""
    from ..versions.versions_in_store import store_at, version_called

    path = Path(target)
    if path.exists() or path.suffix in (".onnx", ".pt2") or ".py:" in path.name:
        return path
    return version_called(target, store_at(store))


def _said(facts: Mapping[str, Any], of_server: bool) -> str:
    first = facts["first"]
    if first is None:
        return f"no difference: rounding explains all {facts['tensors']} tensors that both have"
    error = (
        "B has no such output, or an integer, a shape or a number that is not finite differs"
        if first["error"] is None
        else f"off by {first['error']:.3g}"
    )
    if first["part"]:
        error += " in slice {1} of axis {0}".format(*first["part"])
    lines = [
        f"the first difference is '{first['tensor']}', which {first['op']} makes: {error}; rounding explains "
        f"{first['explained']:.3g}",
        *_between(first["tensor"], facts["agree"], facts["hidden"], of_server),
        f"{facts['astray']} of the {facts['tensors']} tensors that both have differ",
    ]
    if facts["reproduction"]:
        lines.append(f"its node with its inputs: {facts['reproduction']}")
    if facts["not_written"]:
        lines.append(f"nothing is written to --out: {facts['not_written']}")
    return "\n".join(lines)


def _between(tensor: str, agree: Sequence[str], hidden: int, of_server: bool) -> list[str]:
    """The tensors between which the fault lies; nothing where the node before the difference has it."""
    if not hidden:
        return []
    shown = ", ".join(f"'{name}'" for name in agree[:3]) + (", …" if len(agree) > 3 else "")
    those = f"{shown} ({'agrees' if len(agree) == 1 else 'agree'})" if agree else "the constants"
    many = f"the {hidden} tensors" if hidden > 1 else "the tensor"
    lines = [f"the fault is between {those} and '{tensor}' (differs); B does not have {many} between them"]
    if of_server:
        lines.append("to compare them too, serve the file that this writes: halfeven diff A --visible FILE")
    return lines


@order
def index_check(
    target: Annotated[str, typer.Argument(help="NAME or NAME@VERSION of the store.")],
    index: Annotated[Path, typer.Option(help="The vectors that FP32 made: .npy [vectors, d], or .parquet.")],
    queries: Annotated[
        Path, typer.Option(help="npz or safetensors: inputs of the model, a row for each query.")
    ],
    k: Annotated[
        int, typer.Option("-k", min=1, max=1000, help="Neighbours that are searched for each query.")
    ] = 10,
    metric: Annotated[str, typer.Option(help="cosine or dot.")] = "cosine",
    output: Annotated[
        str | None, typer.Option(help="The output that is the vector, where there are several.")
    ] = None,
    judgements: Annotated[Path | None, typer.Option(help="npz: query, vector, relevance; adds nDCG.")] = None,
    min_recall: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="The exit code is 3 where less is found; default: min_recall of the model's [parity], or 0.99.",
        ),
    ] = None,
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Search an index of FP32 vectors with the half's query vectors, and compare with what FP32 finds."""
    from ...exporters.differing.index_check import METRICS, check_index, index_file, least_recall
    from ..versions.versions_in_store import store_at, version_called

    if metric not in METRICS:
        raise BadSetting(f"--metric {metric!r}: expected one of {', '.join(METRICS)}")
    version = version_called(target, store_at(store))
    vectors, least = index_file(index), least_recall(version, min_recall)
    asked: Any = {"k": k, "least": least, "metric": metric, "output": output, "judgements": judgements}
    forms = check_index(version, vectors, queries, **asked, notify=notify)
    holds = all(form["recall"] >= least for form in forms.values())
    lines = [_index_line(name, form) for name, form in forms.items()]
    if not holds:
        lines.append(f"refused: a recall of at least {least:g} is asked")
    facts = {
        "model": version.name,
        "version": version.number,
        "holds": holds,
        "min_recall": least,
        "forms": forms,
    }
    return facts, "\n".join(lines), 0 if holds else 3


def _index_line(name: str, form: Mapping[str, Any]) -> str:
    ndcg = form["ndcg"]
    return (
        f"{name}: recall@{form['k']} {form['recall']:.4f} (worst query {form['worst_query']}: "
        f"{form['worst_recall']:.2f}), {form['swapped']} of {form['pairs']} pairs changed places"
        + (f", nDCG {ndcg[0]:.4f} in FP32 and {ndcg[1]:.4f} in half" if ndcg else "")
    )


@order
def export(
    target: Annotated[str, typer.Argument(help="NAME (the active version) or NAME@VERSION.")],
    folder: Annotated[Path, typer.Argument(help="A new or an empty folder.")],
    engine: Annotated[str, typer.Option("--for", help="tensorrt, onnxruntime or openvino.")],
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Write a proven half as ONNX, with its proof and the build command of another engine."""
    from rich.text import Text

    from ...exporters.exported.folder import export as write
    from ..versions.versions_in_store import store_at, version_called

    facts = write(version_called(target, store_at(store)), engine, folder, notify)
    next_step = f"build it as {folder}/README.md says, then: halfeven prove {folder} --against URL"
    return facts, Text(f"{facts['model']}@{facts['version']} is in {folder}\n{next_step}"), 0


@order
def prove(
    target: Annotated[
        str, typer.Argument(help="NAME, NAME@VERSION, or a folder that `halfeven export` wrote.")
    ],
    against: Annotated[
        str,
        typer.Option(help="http://HOST:PORT (a V2 server), FILE.onnx, or FILE.npz: answers to inputs.npz."),
    ],
    store: StoreAt = DEFAULT_STORE,
    samples: Annotated[Path | None, typer.Option(help="Judge with these instead of the stored ones.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each request to a server.")] = 60.0,
    header: Annotated[
        list[str] | None, typer.Option(help="'NAME: VALUE', sent with every request to a server.")
    ] = None,
    key: Key = None,
    key_file: KeyFileOf = None,
) -> Ended:
    """Compare another engine's answers with those of the FP32 original, by the rules that judge a half."""
    from .prove_command import prove_against, shown

    facts = prove_against(target, store, against, samples, timeout, header or (), notify)
    return facts, shown(facts), 0 if facts["status"] == "equal" else 3
