"""``python -m halfeven``: the command line."""

from halfeven.serve.cli.entry import main

main()
