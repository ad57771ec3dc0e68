"""The commands for single files, without a store: ``fp16`` writes a proven half, ``verify`` checks one again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import Json, finish_order, notify, progress


def fp16(
    model: Annotated[
        Path, typer.Argument(help="An ONNX file, an exported program (.pt2), or a model folder.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The ONNX file to write, as model.fp16.onnx.")],
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
    """Write the proven half of a model as one ONNX file, with its proof in a folder beside it; nothing if unequal."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from rich.console import Group
        from rich.text import Text

        from ...exporters.convert import Options
        from ...exporters.exported.half_file import EQUAL, write_half
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
    """Hold a half against its proof: the digests, and the gate again under the ONNX Runtime of now."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ...exporters.exported.half_file import verify as verified
        from .prove_command import shown

        facts = verified(file, samples, notify)
        return facts, shown(facts), 0 if facts["status"] == "equal" else 3

    finish_order(work, as_json)
