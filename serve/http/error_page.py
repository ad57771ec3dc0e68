"""An error as a page, for a person whose browser asked."""

from functools import cache
from http import HTTPStatus
from pathlib import Path

from jinja2 import Template

from ...exporters.report.page import pages_of


def error_page(path: str, status: int, code: str, message: str) -> bytes:
    """The page of an error. ``path``: of the request; the link home is relative to it."""
    root = "../" * (path.count("/") - 1) or "./"
    title = HTTPStatus(status).phrase
    page = _template().render(root=root, status=status, title=title, code=code, message=message)
    return page.encode()


@cache
def _template() -> Template:
    return pages_of(Path(__file__).parent).get_template("error.html")
