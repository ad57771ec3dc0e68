"""`halfeven lint`: each mistake is found at its line, the line to write mends it, and correct loops are not named."""

import json
from pathlib import Path

import pytest
from halfeven.serve.cli.main import app
from halfeven.serve.finetune.lint.lint import lint
from halfeven.serve.finetune.lint.training_script import BadScript, Finding
from typer.testing import CliRunner

from tests.serve.finetune.lint.scripts import CORRECT, MISTAKES, RECIPE


def findings(folder: Path, text: str) -> list[Finding]:
    script = folder / "train.py"
    script.write_text(text)
    return lint([script])


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_loop_is_not_named(name: str, tmp_path: Path) -> None:
    assert findings(tmp_path, CORRECT[name]) == []


@pytest.mark.parametrize("rule", MISTAKES)
def test_a_mistake_is_named_at_its_line_and_nothing_else_is(rule: str, tmp_path: Path) -> None:
    lines = MISTAKES[rule].splitlines()
    faulty = [number for number, line in enumerate(lines, 1) if line.endswith("# <-")]
    assert [(one.rule, one.line) for one in findings(tmp_path, MISTAKES[rule])] == [(rule, faulty[0])]


# The line to write goes elsewhere: before the loop, behind the step, out of the region.
ELSEWHERE = {"scaler-in-loop", "update-in-window", "backward-in-autocast"}


@pytest.mark.parametrize("rule", sorted(MISTAKES.keys() - ELSEWHERE))
def test_with_the_line_that_is_to_be_written_instead_nothing_is_found(rule: str, tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, MISTAKES[rule])
    lines = MISTAKES[rule].splitlines()
    old = lines[finding.line - 1]
    indent = old[: len(old) - len(old.lstrip())]
    lines[finding.line - 1 : finding.line] = [indent + line for line in finding.instead.splitlines()]
    assert findings(tmp_path, "\n".join(lines)) == []
    compile("\n".join(lines), "train.py", "exec")


def test_every_correct_loop_is_python(tmp_path: Path) -> None:
    for text in CORRECT.values():
        compile(text, "train.py", "exec")


def test_a_module_beside_a_script_in_half_is_read_as_computing_in_half(tmp_path: Path) -> None:
    net = "from torch import nn\n\nclass Net(nn.Module):\n    def forward(self, q, k, mask):\n"
    net += "        scores = q @ k\n        return scores.masked_fill(mask, -1e9)\n"
    (tmp_path / "net.py").write_text(net)
    (tmp_path / "train.py").write_text(RECIPE)
    assert lint([tmp_path / "net.py"]) == []
    (finding,) = lint([tmp_path / "net.py", tmp_path / "train.py"])
    assert (finding.rule, finding.line) == ("large-mask", 6)
    assert finding.instead == "return scores.masked_fill(mask, torch.finfo(scores.dtype).min)"


def test_a_line_that_allows_its_rule_is_not_named(tmp_path: Path) -> None:
    text = MISTAKES["clip-before-unscale"].replace("# <-", "# lint: allow clip-before-unscale")
    assert findings(tmp_path, text) == []
    other = MISTAKES["clip-before-unscale"].replace("# <-", "# lint: allow missing-update")
    assert [one.rule for one in findings(tmp_path, other)] == ["clip-before-unscale"]


def test_the_script_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    assert findings(tmp_path, f"open({str(marker)!r}, 'w')\n" + RECIPE) == []
    assert not marker.exists()


BAD = {
    "no Python": (b"import torch\nprint 'hello'\n", "train.py:2: not Python"),
    "a NUL byte": (b"x = 1\0\n", "not Python|cannot be read"),
    "another encoding": (b"x = '\xff\xfe'\n", "not Python|cannot be read"),
    "too deep": (
        b"x = " + b"(" * 150 + b"1" + b")" * 150 + b"\ny = " + b"-" * 400 + b"1\n",
        "nested|cannot be read",
    ),
    "deeper than the parser goes": (b"x = " + b"-" * 200_000 + b"1\n", "cannot be read|nested|not Python"),
    "too long": (b"#" * ((1 << 20) + 1), "at most 1048576 bytes"),
    "too much": (b"x()\n" * 30_000, "at most 100000"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_as_python_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    data, words = BAD[name]
    (tmp_path / "train.py").write_bytes(data)
    with pytest.raises(BadScript, match=words):
        lint([tmp_path / "train.py"])


def test_the_command_ends_with_3_for_findings_0_for_none_and_2_for_a_file_that_is_not_there(
    tmp_path: Path,
) -> None:
    faulty, clean = tmp_path / "faulty.py", tmp_path / "clean.py"
    faulty.write_text(MISTAKES["missing-update"])
    clean.write_text(RECIPE)
    done = CliRunner().invoke(app, ["lint", str(clean), str(faulty), "--json"])
    facts = json.loads(done.stdout.splitlines()[-1])
    assert (done.exit_code, facts["status"], len(facts["findings"])) == (3, "found", 1)
    assert set(facts["findings"][0]) == {"file", "line", "rule", "message", "instead"}
    shown = CliRunner().invoke(app, ["lint", str(faulty)])
    assert (
        f"{faulty}:17: missing-update: " in shown.stdout and "\n           scaler.update()\n" in shown.stdout
    )
    assert CliRunner().invoke(app, ["lint", str(clean)]).exit_code == 0
    assert CliRunner().invoke(app, ["lint", str(tmp_path / "none.py")]).exit_code == 2
