"""The code of docs/python.md."""

from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs/python.md"
BLOCKS = [part.partition("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
