"""docs/recipes.md: its code runs from first to last and prints what stands there; lint finds nothing in it."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.lint.lint import lint

PAGE = Path(__file__).resolve().parents[4] / "docs/recipes.md"
BLOCKS = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", PAGE.read_text(), re.S)
WRONG = "class Wrong("  # which the page says of itself


@pytest.mark.slow(seconds=4)
def test_every_block_of_the_page_prints_what_stands_behind_it() -> None:
    assert len(BLOCKS) == PAGE.read_text().count("```python\n")
    names: dict[str, Any] = {"__name__": "recipes"}
    for number, (code, expected) in enumerate(BLOCKS):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"recipe {number}", "exec"), names)
        assert printed.getvalue() == expected, code
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lint_finds_nothing_in_the_recipes_but_the_function_that_is_called_wrong(
    device: str, tmp_path: Path
) -> None:
    script = tmp_path / "recipes.py"
    script.write_text("\n".join(code for code, _ in BLOCKS).replace('DEVICE = "cpu"', f'DEVICE = "{device}"'))
    lines = script.read_text().splitlines()
    found = lint([script])
    assert [one.rule for one in found] == ["custom-function"], found
    assert any(WRONG in line for line in lines[found[0].line - 4 : found[0].line])
