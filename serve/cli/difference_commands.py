"""The commands that compare two engines of one model: ``diff`` by their tensors, ``index-check`` by a search."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...models.errors import BadSetting
from .console import DEFAULT_STORE, Ended, Key, KeyFileOf, StoreAt, notify, order


@order
def diff(
    ours: Annotated[Path, typer.Argument(metavar="A", help="The ONNX file that is right.")],
    theirs: Annotated[str, typer.Argument(metavar="B", help="Another ONNX file, or the URL of a V2 server.")],
    samples: Annotated[Path, typer.Option(help="npz or safetensors: inputs by name, axis 0 the samples.")],
    dtype: Annotated[
        str, typer.Option(help="What B computes in: fp32, fp16 or bf16; for a file it is read from the file.")
    ] = "fp32",
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the node that differs, with its inputs.")
    ] = None,
    key: Key = None,
    key_file: KeyFileOf = None,
) -> Ended:
    """Run two engines of one model on the same samples; name the first tensor that differs by more than rounding."""
    from ...exporters.differing.diff import DTYPES, differences
    from ..access.client_key import request_headers
    from .v2_engine import v2_engine

    if dtype not in DTYPES:
        raise BadSetting(f"--dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    b = v2_engine(theirs, ours.stem, 60.0, request_headers(())) if "://" in theirs else Path(theirs)
    facts = differences(ours, b, samples, dtype, out)
    return facts, _said(facts), 0 if facts["equal"] else 3


def _said(facts: Mapping[str, Any]) -> str:
    first = facts["first"]
    if first is None:
        return f"no difference: rounding explains all {facts['tensors']} tensors that both have"
    error = (
        "an integer, a shape or a number that is not finite differs"
        if first["error"] is None
        else f"off by {first['error']:.3g}"
    )
    lines = [
        f"the first difference is '{first['tensor']}', which {first['op']} makes: {error}; rounding explains "
        f"{first['explained']:.3g}",
        f"{facts['astray']} of the {facts['tensors']} tensors that both have differ",
    ]
    return "\n".join(
        lines + ([f"its node with its inputs: {facts['reproduction']}"] if facts["reproduction"] else [])
    )


@order
def index_check(
    target: Annotated[str, typer.Argument(help="NAME or NAME@VERSION of the store.")],
    index: Annotated[Path, typer.Option(help="A .npy file: the vectors that FP32 made, [vectors, d].")],
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
        float, typer.Option(min=0, max=1, help="The exit code is 3 where less is found.")
    ] = 0.99,
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Search an index of FP32 vectors with the half's query vectors, and compare with what FP32 finds."""
    from ...exporters.differing.index_check import METRICS, check_index, index_file
    from ..versions.versions_in_store import store_at
    from .parity_command import version_called

    if metric not in METRICS:
        raise BadSetting(f"--metric {metric!r}: expected one of {', '.join(METRICS)}")
    version = version_called(target, store_at(store))
    vectors = index_file(index)
    forms = check_index(
        version, vectors, queries, k=k, metric=metric, output=output, judgements=judgements, notify=notify
    )
    holds = all(form["recall"] >= min_recall for form in forms.values())
    lines = [
        f"{name}: recall@{form['k']} {form['recall']:.4f} (worst query {form['worst_query']}: "
        f"{form['worst_recall']:.2f}), {form['swapped']} of {form['pairs']} pairs changed places"
        + (f", nDCG {form['ndcg'][0]:.4f} in FP32 and {form['ndcg'][1]:.4f} in half" if form["ndcg"] else "")
        for name, form in forms.items()
    ]
    facts = {"model": version.name, "version": version.number, "holds": holds, "forms": forms}
    return facts, "\n".join(lines), 0 if holds else 3
