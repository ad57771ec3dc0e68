"""``halfeven lint``: the mistakes of half precision in training scripts, of which nothing is run."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .console import Ended, Json, command


@command
def lint(
    scripts: Annotated[list[Path], typer.Argument(help="Python files, read as one program; none is run.")],
    as_json: Json = False,
) -> Ended:
    """Name the mistakes of half precision in training scripts, each with the line to write instead."""
    from ..finetune.lint.lint import lint

    found = lint(scripts)
    lines = []
    for one in found:
        lines.append(f"{one.file}:{one.line}: {one.rule}: {one.message}")
        moved = (one.first, one.last) != (one.line, one.line)
        lines.append(f"    write in place of lines {one.first} to {one.last}:" if moved else "    write:")
        lines += [f"        {text}" for text in one.instead.splitlines()]
    files = f"{len(scripts)} file{'s' if len(scripts) > 1 else ''}"
    lines.append(f"{len(found)} finding{'' if len(found) == 1 else 's'} in {files}")
    facts = {"status": "found" if found else "clean", "findings": [asdict(one) for one in found]}
    if not as_json:
        typer.echo("\n".join(lines))  # rich's console would break lines of code
    return facts, None, 3 if found else 0
