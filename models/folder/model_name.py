"""What a model may be called: a name that is a folder's and a part of a URL as it stands."""

import re

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
