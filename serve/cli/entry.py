"""The console script: it imports the command line, which takes a second, and ends in a sentence if interrupted."""

import sys


def main() -> None:
    try:
        from .main import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing half-written is left behind\n")
        sys.exit(1)
