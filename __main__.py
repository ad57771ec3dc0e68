"""``python -m halfeven``: the command line."""

from halfeven.serve.cli.main import main

main()
