"""The commands for halves as files of their own: ``fp16`` writes one with its proof, ``verify`` compares both, ``lock``
records what was proven, ``check`` proves it again after an upgrade."""

import json
import os
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...models.errors import BadInput
from .console import DEFAULT_STORE, Ended, StoreAt, check_target, notify, order, progress

if TYPE_CHECKING:
    from ...exporters.half_files.measured import Found


@order
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
) -> Ended:
    """Write a model in half precision as one ONNX file, with its proof beside it, if it is proven equal."""
    from rich.console import Group
    from rich.text import Text

    from ...exporters.conversion.convert import Options
    from ...exporters.half_files.half_file import EQUAL, write_half
    from ...exporters.report.page import render_terminal

    options = Options(level=level, dtype=dtype, keep=tuple(keep or ()), samples=samples, search=search)
    with progress("converting") as show:
        facts = write_half(model, out, options, show)
    equal = facts["verdict"] == EQUAL
    there = shlex.quote(f"./{out}" if str(out).startswith("-") else str(out))  # as a shell takes it
    said = (
        f"half: {facts['file']}\nproof: {facts['proof']}\nnext: halfeven verify {there}"
        if equal
        else f"no half was written: {facts['reason'] or 'none is proven equal'}"
    )
    if not equal and out.exists():
        notify(f"{out} is the half of an earlier run and was not changed: this run does not prove it")
    return facts, Group(render_terminal(facts), Text("\n" + said)), 0 if equal else 3


@order
def verify(
    file: Annotated[Path, typer.Argument(help="A half that `halfeven fp16` wrote.")],
    samples: Annotated[Path | None, typer.Option(help="Judge with these instead of the proof's.")] = None,
    card: Annotated[bool, typer.Option("--card", help="Print a Markdown block for a model card.")] = False,
) -> Ended:
    """Compare a half with its proof: its digests, and the gate again with the installed ONNX Runtime."""
    from ...exporters.half_files.half_file import model_card
    from ...exporters.half_files.half_file import verify as verified
    from .prove_command import shown

    facts = verified(file, samples, notify)
    facts |= {"card": model_card(file, facts)} if card else {}
    return facts, facts.get("card") or shown(facts), 0 if facts["status"] == "equal" else 3


_LOCK = Path("halfeven.lock")


@order
def lock(
    targets: Annotated[
        list[str],
        typer.Argument(help="Halves that `halfeven fp16` wrote, or NAME or NAME@VERSION of the store."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The lock file to write.")] = _LOCK,
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Prove halves once more, and record files, libraries, processor, bits of the answers, and speed."""
    from ...exporters.half_files.lock_file import write_lock

    check_target("-o", out, replaces=True)
    facts = write_lock(out, {target: _found(target, store) for target in targets}, notify)
    said = [f"{one['target']} ({one['form']}): {one['summary']}" for one in facts["halves"]]
    return facts, "\n".join([*said, f"written: {out}"]), 0


@order
def check(
    path: Annotated[Path, typer.Option("--lock", help="The lock file.")] = _LOCK,
    store: StoreAt = DEFAULT_STORE,
    against: Annotated[
        str | None,
        typer.Option(
            "--against-env",
            help="The python of another environment that has halfeven: check there, not here.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on any change, even where the answers are still equal.")
    ] = False,
) -> Ended:
    """Prove locked halves again with what is installed now, and say what changed; 3 if one does not hold."""
    from ...exporters.differing.elsewhere import started_as
    from ...exporters.half_files.lock_file import checked, read_lock

    then = read_lock(path)
    if against is None:
        halves = [
            {
                "target": target,
                "form": form,
                "holds": not any(change.fails or strict for change in changes),
                "changes": [asdict(change) for change in changes],
            }
            for target, form, changes in checked(then, lambda target: _found(target, store), notify)
        ]
    else:
        halves = _checked_by(started_as(against), path, store, strict)
    lines = list[str]()
    for half in halves:
        lines.append(f"{half['target']} ({half['form']}): {'holds' if half['holds'] else 'does not hold'}")
        lines += [f"  {change['kind']}: {change['message']}" for change in half["changes"]]
    holds = all(half["holds"] for half in halves)
    return {"holds": holds, "halves": halves}, "\n".join(lines), 0 if holds else 3


def _found(target: str, store: Path) -> "Found":
    from ...exporters.half_files.measured import Found, found_file
    from ..versions.versions_in_store import store_at, version_called

    if target.endswith(".onnx"):
        return found_file(Path(target))
    return Found(version_called(target, store_at(store)))


def _checked_by(python: Path, path: Path, store: Path, strict: bool) -> list[dict[str, Any]]:
    """The halves as the halfeven of another environment checks them now. Raises BadInput where it does not."""
    words = ["check", "--lock", str(path), "--store", str(store), "--json", *(["--strict"] if strict else [])]
    notify(f"asking the halfeven of {python}")
    command = [str(python), "-P", "-m", "halfeven", *words]
    # With them the other Python would import the packages of this one.
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    except OSError as error:
        raise BadInput(
            f"--against-env {python}: {error.strerror}; expected the python of an environment"
        ) from error
    last = next(iter(done.stdout.strip().splitlines()[-1:]), "")
    try:
        facts = json.loads(last) if last.startswith("{") else {}
    except ValueError:
        facts = {}
    if "halves" not in facts:
        why = facts.get("error") or next(iter(done.stderr.strip().splitlines()[-1:]), "no reason given")
        raise BadInput(f"--against-env {python}: its halfeven does not check these halves: {why}")
    return list(facts["halves"])
