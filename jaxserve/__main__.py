"""`python -m jaxserve`, the same as the `jaxserve` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from jaxserve.cli.main import run
    except KeyboardInterrupt:  # while the command is still being imported
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
