"""`halfeven lint`: each mistake is found at its line, the line to write mends it, and correct loops are not named."""

import json
import re
from pathlib import Path

import pytest
from halfeven.models.python_text.python_script import BadScript
from halfeven.serve.cli.main import app
from halfeven.serve.finetune.lint.finding import Finding
from halfeven.serve.finetune.lint.lint import lint
from typer.testing import CliRunner

from tests.serve.finetune.lint.clean_loops import CLEAN
from tests.serve.finetune.lint.running import mended, run
from tests.serve.finetune.lint.scripts import CORRECT, MISTAKES, RECIPE
from tests.serve.finetune.lint.spellings import FURTHER, SEEDED, SPELLINGS


def findings(folder: Path, text: str) -> list[Finding]:
    script = folder / "train.py"
    script.write_text(text)
    return lint([script])


CASES = [
    pytest.param(rule, text, id=f"{rule}-{number}")
    for rule in sorted(MISTAKES.keys() | SPELLINGS.keys())
    for number, text in enumerate([*([MISTAKES[rule]] if rule in MISTAKES else []), *SPELLINGS.get(rule, [])])
]
CASES_WITHOUT_LINE = [
    pytest.param(rule, text, id=f"{rule}-further-{number}") for number, (rule, text) in enumerate(FURTHER)
]
KINDS = {  # of the rules, and the mistakes that have two spellings
    rule
    for rule in MISTAKES.keys() | SPELLINGS.keys()
    if len(SPELLINGS.get(rule, [])) + (rule in MISTAKES) > 1
}


@pytest.mark.parametrize("name", [*CORRECT, *CLEAN])
def test_a_correct_loop_is_not_named(name: str, tmp_path: Path) -> None:
    text = CORRECT.get(name) or CLEAN[name]
    compile(text, "train.py", "exec")
    assert findings(tmp_path, text) == []


@pytest.mark.parametrize(("rule", "text"), CASES)
def test_a_mistake_is_named_at_its_line_and_nothing_else_is(rule: str, text: str, tmp_path: Path) -> None:
    faulty = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# <-")]
    assert faulty
    assert [(one.rule, one.line) for one in findings(tmp_path, text)] == [(rule, line) for line in faulty]


@pytest.mark.parametrize(("rule", "text"), CASES_WITHOUT_LINE)
def test_a_mistake_through_names_and_functions_is_named_and_nothing_else_is(
    rule: str, text: str, tmp_path: Path
) -> None:
    assert {one.rule for one in findings(tmp_path, text)} == {rule}


@pytest.mark.parametrize(("rule", "text"), [*CASES, *CASES_WITHOUT_LINE])
def test_the_script_runs_once_its_advice_is_followed(rule: str, text: str, tmp_path: Path) -> None:
    """Each step of the advice is applied to the script, then the script runs on this machine."""
    mended_text = mended(text, tmp_path / "train.py")
    assert mended_text != text
    run(mended_text, tmp_path)


def test_every_rule_of_the_documentation_is_found_in_two_spellings() -> None:
    table = (Path(__file__).parents[4] / "docs/finetune.md").read_text().split("| rule | finds |")[1]
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M))))
    assert named == MISTAKES.keys() | SPELLINGS.keys()
    assert named == KINDS


def test_a_module_beside_a_script_in_half_is_read_as_computing_in_half(tmp_path: Path) -> None:
    net = "from torch import nn\n\nclass Net(nn.Module):\n    def forward(self, q, k, mask):\n"
    net += "        scores = q @ k\n        return scores.masked_fill(mask, -1e9)\n"
    (tmp_path / "net.py").write_text(net)
    (tmp_path / "train.py").write_text(RECIPE)
    assert lint([tmp_path / "net.py"]) == []
    (finding,) = lint([tmp_path / "net.py", tmp_path / "train.py"])
    assert (finding.rule, finding.line) == ("large-mask", 6)
    assert finding.instead == "import torch\nreturn scores.masked_fill(mask, torch.finfo(scores.dtype).min)"


@pytest.mark.slow
def test_a_script_with_a_dozen_mistakes_is_clean_and_trains_after_all_advice(tmp_path: Path) -> None:
    rules = {one.rule for one in findings(tmp_path, SEEDED)}
    assert len(rules) >= 10, rules
    after = run(mended(SEEDED, tmp_path / "train.py"), tmp_path)
    assert after["losses"][-1] < 0.7 * after["losses"][0]
    assert after["scaler"].get_scale() < 2.0**60  # it overflowed, skipped, and went on


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


@pytest.mark.slow
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
    assert set(facts["findings"][0]) == {*("file", "line", "rule", "message", "instead", "first", "last")}
    shown = CliRunner().invoke(app, ["lint", str(faulty)])
    assert f"{faulty}:17: missing-update: " in shown.stdout and "\n        scaler.update()\n" in shown.stdout
    assert CliRunner().invoke(app, ["lint", str(clean)]).exit_code == 0
    assert CliRunner().invoke(app, ["lint", str(tmp_path / "none.py")]).exit_code == 2
