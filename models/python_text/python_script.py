"""A Python file as its syntax tree. Nothing of the file is run; its size and its nesting are bounded."""

import ast
import io
import re
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadInput

MOST_BYTES = 1 << 20
DEEPEST = 200  # levels of the syntax tree
MOST_NODES = 100_000  # of it: some rules compare calls with each other


class BadScript(BadInput):
    """A file cannot be read as Python. Correct the line that the message names."""

    code = "bad_script"


@dataclass(frozen=True, slots=True)
class Script:
    path: Path
    lines: list[str]
    tree: ast.Module

    def allows(self, line: int, rule: str) -> bool:
        """True if the line has the comment ``# lint: allow RULE``."""
        found = re.search(r"#\s*lint:\s*allow\s+([\w-]+(?:\s*,\s*[\w-]+)*)", self.lines[line - 1])
        return found is not None and rule in re.split(r"\s*,\s*", found.group(1))


def read_script(path: Path) -> Script:
    """Raises BadScript where the file is too large, too deeply nested or no Python; OSError where it cannot be read."""
    with path.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadScript(
            f"{path}: expected at most {MOST_BYTES} bytes of Python, got more; name a single script"
        )
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own invalid escapes
            tree = ast.parse(text)
    except SyntaxError as error:
        raise BadScript(
            f"{path}:{error.lineno or 1}: not Python that this interpreter reads ({error.msg}); correct it first"
        ) from None
    # NUL bytes, another encoding; nesting that ends the parser.
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadScript(f"{path}: cannot be read as Python ({error or type(error).__name__})") from None
    _check_size(path, tree)
    # The lines as Python counts them: a form feed or U+2028 does not end one.
    return Script(path, [line.rstrip("\r\n") for line in io.StringIO(text, newline=None)], tree)


def _check_size(path: Path, tree: ast.Module) -> None:
    waiting: list[tuple[ast.AST, int]] = [(tree, 0)]
    count = 0
    while waiting:
        count += 1
        if count > MOST_NODES:
            raise BadScript(
                f"{path}: expected at most {MOST_NODES} nodes of Python, got more; split the script"
            )
        node, depth = waiting.pop()
        if depth > DEEPEST:
            line = getattr(node, "lineno", 1)
            raise BadScript(
                f"{path}:{line}: nested more than {DEEPEST} levels deep; split the expression or the `elif` chain"
            )
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
