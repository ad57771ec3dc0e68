"""docs/notebooks: every cell runs, in order, and the notebooks are kept with what their cells gave.
HALFEVEN_TEST_WRITE=1 writes the outputs anew."""

import ast
import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[3] / "docs/notebooks").glob("*.ipynb"))
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_setup")]


def ran(source: str, seen: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell, as a notebook keeps them: what it printed, and the value of its last line."""
    body = ast.parse(source)
    last = ast.Expression(body.body.pop().value) if isinstance(body.body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(body, "cell", "exec"), seen)
        value = None if last is None else eval(compile(last, "cell", "eval"), seen)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "data": data, "metadata": {}})
    return outputs


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_cell_runs_and_gave_what_is_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook, seen = json.loads(file.read_text()), dict[str, Any]()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, 1):
        outputs = ran("".join(cell["source"]), seen)
        for one in outputs:
            if one["output_type"] == "execute_result":
                one["execution_count"] = count
        kept = [one["output_type"] for one in cell["outputs"]]
        if os.environ.get("HALFEVEN_TEST_WRITE"):
            cell["outputs"], cell["execution_count"] = outputs, count
        else:
            assert kept == [one["output_type"] for one in outputs], "".join(cell["source"])
    if os.environ.get("HALFEVEN_TEST_WRITE"):
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def test_the_notebooks_are_three_and_were_run() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["1_convert", "2_serve", "3_finetune"]
    for file in NOTEBOOKS:
        cells = [one for one in json.loads(file.read_text())["cells"] if one["cell_type"] == "code"]
        assert all(cell["execution_count"] for cell in cells)
        assert str(Path.home()) not in file.read_text() and "/tmp/" not in file.read_text()
