"""The commands that keep a proof beside a file, hold it over upgrades, and compare two engines of one model: ``fp16``,
``verify``, ``lock``, ``check``, ``diff``, ``index-check``."""

import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...models.errors import BadInput, BadSetting, ParityRefused
from .console import (
    DEFAULT_STORE,
    Json,
    Key,
    KeyFileOf,
    StoreAt,
    check_target,
    finish_order,
    notify,
    progress,
)

if TYPE_CHECKING:
    from ...exporters.half_files.measured import Found


def fp16(
    model: Annotated[
        Path, typer.Argument(help="An ONNX file, an exported program (.pt2), or a model folder.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The ONNX file to write, such as model.fp16.onnx.")
    ],
    samples: Annotated[
        Path | None,
        typer.Option(help="npz or safetensors: inputs by name, axis 0 the samples; default: generated."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp16 or bf16.")] = None,
    level: Annotated[str | None, typer.Option(help="O1 to O3, or Keras' words.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Keep in FP32: op:NAME or a node's name.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Look for nodes to keep in FP32 at O3 too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a model in half precision as one ONNX file, with its proof beside it, if it is proven equal."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from rich.console import Group
        from rich.text import Text

        from ...exporters.convert import Options
        from ...exporters.half_files.half_file import EQUAL, write_half
        from ...exporters.report.page import render_terminal

        options = Options(level=level, dtype=dtype, keep=tuple(keep or ()), samples=samples, search=search)
        with progress("converting") as show:
            facts = write_half(model, out, options, show)
        equal = facts["verdict"] == EQUAL
        said = (
            f"half: {facts['file']}\nproof: {facts['proof']}\nnext: halfeven verify {out}"
            if equal
            else f"no half was written: {facts['reason'] or 'none is proven equal'}"
        )
        return facts, Group(render_terminal(facts), Text("\n" + said)), 0 if equal else 3

    finish_order(work, as_json)


def verify(
    file: Annotated[Path, typer.Argument(help="A half that `halfeven fp16` wrote.")],
    samples: Annotated[Path | None, typer.Option(help="Judge with these instead of the proof's.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a half with its proof: its digests, and the gate again with the installed ONNX Runtime."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ...exporters.half_files.half_file import verify as verified
        from .prove_command import shown

        facts = verified(file, samples, notify)
        return facts, shown(facts), 0 if facts["status"] == "equal" else 3

    finish_order(work, as_json)


_LOCK = Path("halfeven.lock")


def lock(
    targets: Annotated[
        list[str],
        typer.Argument(help="Halves that `halfeven fp16` wrote, or NAME or NAME@VERSION of the store."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The lock file to write.")] = _LOCK,
    store: StoreAt = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Prove halves once more, and record files, libraries, processor, bits of the answers, and speed."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ...exporters.half_files.lock_file import write_lock

        check_target("-o", out)
        facts = write_lock(out, {target: _found(target, store) for target in targets}, notify)
        said = [f"{one['target']} ({one['form']}): {one['summary']}" for one in facts["halves"]]
        return facts, "\n".join([*said, f"written: {out}"]), 0

    finish_order(work, as_json)


def check(
    path: Annotated[Path, typer.Option("--lock", help="The lock file.")] = _LOCK,
    store: StoreAt = DEFAULT_STORE,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against-env",
            help="The python of another environment that has halfeven: check there, not here.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on any change, even where the answers are still equal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove locked halves again with what is installed now, and say what changed; 3 if one does not hold."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ...exporters.half_files.lock_file import checked, compared, read_lock

        then = read_lock(path)
        if against is None:
            found = checked(then, lambda target: _found(target, store), notify)
        else:
            found = compared(
                then, _locked_by(against, list(dict.fromkeys(one["target"] for one in then)), store)
            )
        halves = [
            {
                "target": target,
                "form": form,
                "holds": not any(change.fails or strict for change in changes),
                "changes": [asdict(change) for change in changes],
            }
            for target, form, changes in found
        ]
        lines = list[str]()
        for half in halves:
            lines.append(
                f"{half['target']} ({half['form']}): {'holds' if half['holds'] else 'does not hold'}"
            )
            lines += [f"  {change['kind']}: {change['message']}" for change in half["changes"]]
        holds = all(half["holds"] for half in halves)
        return {"holds": holds, "halves": halves}, "\n".join(lines), 0 if holds else 3

    finish_order(work, as_json)


def _found(target: str, store: Path) -> "Found":
    from ...exporters.half_files.measured import Found, found_file
    from ..versions.versions_in_store import store_at
    from .parity_command import version_called

    if target.endswith(".onnx"):
        return found_file(Path(target))
    return Found(version_called(target, store_at(store)))


def _locked_by(python: Path, targets: list[str], store: Path) -> list[Mapping[str, Any]]:
    """The lock that the halfeven of another environment writes now. Raises BadInput where it does not."""
    from ...exporters.half_files.lock_file import read_lock

    with TemporaryDirectory(prefix="halfeven-lock-") as place:
        written = Path(place) / "halfeven.lock"
        command = [
            str(python),
            "-P",
            "-m",
            "halfeven",
            "lock",
            *targets,
            "-o",
            str(written),
            "--store",
            str(store),
        ]
        notify(f"asking the halfeven of {python}")
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BadInput(
                f"--against-env {python}: {error.strerror}; expected the python of an environment"
            ) from error
        if done.returncode:
            last = next(iter(done.stderr.strip().splitlines()[-1:]), "no reason given")
            if done.returncode == 3:
                raise ParityRefused(f"--against-env {python}: a half does not hold there: {last}")
            raise BadInput(f"--against-env {python}: its halfeven does not lock these halves: {last}")
        return list(read_lock(written))


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
    as_json: Json = False,
) -> None:
    """Run two engines of one model on the same samples; name the first tensor that differs by more than rounding."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ...exporters.differing.diff import DTYPES, differences
        from ..access.client_key import request_headers
        from .v2_engine import v2_engine

        if dtype not in DTYPES:
            raise BadSetting(f"--dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        b = v2_engine(theirs, ours.stem, 60.0, request_headers(())) if "://" in theirs else Path(theirs)
        facts = differences(ours, b, samples, dtype, out)
        return facts, _said(facts), 0 if facts["equal"] else 3

    finish_order(work, as_json)


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
    as_json: Json = False,
) -> None:
    """Search an index of FP32 vectors with the half's query vectors, and compare with what FP32 finds."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
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
            + (
                f", nDCG {form['ndcg'][0]:.4f} in FP32 and {form['ndcg'][1]:.4f} in half"
                if form["ndcg"]
                else ""
            )
            for name, form in forms.items()
        ]
        facts = {"model": version.name, "version": version.number, "holds": holds, "forms": forms}
        return facts, "\n".join(lines), 0 if holds else 3

    finish_order(work, as_json)
