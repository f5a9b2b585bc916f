"""``python -m graft``: the commands."""

from graft.cli import main

main()
