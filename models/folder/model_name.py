"""The names that a model may have: each can be a folder's name, and a part of a URL without escapes."""

import re

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
