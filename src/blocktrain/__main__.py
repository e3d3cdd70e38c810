"""`python -m blocktrain` and the `blocktrain` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit."""
    from blocktrain.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
