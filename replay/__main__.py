"""``python -m replay``."""

from replay.cli import main

main()
