"""The patterns that are recognised in source, and the text that is proposed in their place."""

import ast
from pathlib import Path
from textwrap import dedent, indent

import pytest
from halfeven.exporters.patches.known_patterns import Change, changed, changes_of
from halfeven.models.python_text.python_script import read_script

EVERY_LINE = range(1, 99)


def proposed(body: str, folder: Path, kept: range = EVERY_LINE, before: str = "") -> list[tuple[Change, str]]:
    """The proposals for a forward of these statements (from line 4 on), each with the statements as they become."""
    path, head = folder / "model.py", f"import torch\n{before or '#'}\ndef forward(self, x, mask, n):\n"
    path.write_text(head + indent(dedent(body).strip("\n"), "    ") + "\n")
    script = read_script(path)
    found = [(one, changed(script, [one])) for one in changes_of(script, kept)]
    for _, text in found:
        ast.parse(text)
    return [(one, dedent(text.partition("n):\n")[2]).strip("\n")) for one, text in found]


@pytest.mark.parametrize(
    ("kind", "body", "instead"),
    [
        ("guard", "return x / (n + 1e-8)", "return x / (n + 1e-4)"),
        ("guard", "return x / torch.clamp(n, min=1e-12)", "return x / torch.clamp(n, min=1e-4)"),
        ("guard", "return x / n.clamp_min(1e-9)", "return x / n.clamp_min(1e-4)"),
        ("guard", "return F.normalize(x, dim=-1)", "return F.normalize(x, dim=-1, eps=1e-4)"),
        ("mask", "return x.masked_fill(mask, -1e9)", "return x.masked_fill(mask, -1e4)"),
        ("mask", "return torch.where(mask, x, -1e9)", "return torch.where(mask, x, -1e4)"),
        ("mask", "return x + (1 - mask) * -100000.0", "return x + (1 - mask) * -1e4"),
        ("mask", "v = torch.finfo(x.dtype).min\nreturn x.masked_fill(mask, v)",
         "v = -1e4\nreturn x.masked_fill(mask, v)"),
        ("square", "return x / (x ** 2).sum(-1, keepdim=True).sqrt()",
         "return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)"),
        ("square", "v = x.pow(2).mean(-1, True)\nreturn x * torch.rsqrt(v + 1e-2)",
         "return x * (1 / torch.clamp("
         "torch.linalg.vector_norm(x, dim=-1, keepdim=True) / x.shape[-1] ** 0.5, min=0.1))"),
        ("sum", "return x / x.sum(dim=1, keepdim=True)", "return (x / x.mean(1, keepdim=True) / x.shape[1])"),
        ("softmax", "e = torch.exp(x)\nreturn e / e.sum(-1, keepdim=True)", "return torch.softmax(x, dim=-1)"),
        ("softmax", "x = x.exp()\nx = x / x.sum(-1, keepdim=True)\nreturn x", "x = torch.softmax(x, dim=-1)\nreturn x"),
        ("softmax", "return torch.log(torch.exp(x).sum(-1))", "return torch.logsumexp(x, dim=-1, keepdim=False)"),
    ],
)  # fmt: skip
def test_a_known_pattern_is_written_otherwise(kind: str, body: str, instead: str, tmp_path: Path) -> None:
    assert [text for change, text in proposed(body, tmp_path) if change.kind == kind] == [instead]


@pytest.mark.parametrize(
    "body",
    [
        "return x / (n + 1e-3)",
        f"return x + {10**321}",
        "return x.masked_fill(mask, float('-inf'))",
        "return x.masked_fill(mask, -1e4)",
        "return x / (x ** 3).sum(-1, keepdim=True).sqrt()",
        "return x / x.sum(-1)",
        "return torch.exp(x) / torch.exp(n).sum(-1, keepdim=True)",
        "e = torch.exp(x)\nx = x + 1\nreturn e / e.sum(-1, keepdim=True)",
    ],
)
def test_what_holds_in_half_or_would_have_another_value_is_left(body: str, tmp_path: Path) -> None:
    assert not proposed(body, tmp_path)


def test_a_statement_whose_name_is_read_elsewhere_stays(tmp_path: Path) -> None:
    [(_, text)] = proposed("e = torch.exp(x)\np = e / e.sum(-1, keepdim=True)\nreturn p, e", tmp_path)
    assert text == "e = torch.exp(x)\np = torch.softmax(x, dim=-1)\nreturn p, e"


def test_only_patterns_at_lines_of_kept_nodes_are_proposed(tmp_path: Path) -> None:
    body = "x = x / (n + 1e-8)\nreturn x / (n + 1e-9)"
    assert [change.line for change, _ in proposed(body, tmp_path, range(5, 6))] == [5]


def test_the_number_behind_a_name_is_changed_where_the_file_binds_it_once(tmp_path: Path) -> None:
    [(change, _)] = proposed("return x / (n + EPS)", tmp_path, before="EPS = 1e-8")
    assert (change.replaced.lineno, change.text) == (2, "1e-4")
