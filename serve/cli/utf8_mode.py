"""Files are read and written in UTF-8 whatever the locale is: pages and messages have signs that others lack."""

import locale
import os
import sys


def use_utf8() -> None:
    """Begin this process again in Python's UTF-8 mode, where the locale has another encoding; its terminal keeps the
    locale's, with a question mark for what that lacks. Child processes inherit both."""
    encoding = locale.getencoding()
    if sys.flags.utf8_mode or encoding.lower().replace("-", "") == "utf8":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.environ.setdefault("PYTHONIOENCODING", f"{encoding}:replace")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
